"""Tag sequences with a small GRU-like mixer. Settings come from TAGGER_* environment variables."""
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy


def setting(name, default):
    return type(default)(os.environ.get("TAGGER_" + name, default))


STEPS = setting("STEPS", 90)
BATCH = setting("BATCH", 48)
LONG_FROM = setting("LONG_FROM", 45)
RATE = setting("RATE", 0.15)
BY_TOKENS = setting("BY_TOKENS", 0)
SAVE_AT = setting("SAVE_AT", 0)
FOLDER = setting("FOLDER", "")
WORDS, TAGS, SHORT, LONG = 40, 6, 8, 14


class Mixer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.value, self.out = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x, mask):
        y = self.norm(x)
        value = self.value(y) * mask.unsqueeze(-1)
        seen = mask.cumsum(1).clamp(min=1).unsqueeze(-1)
        return x + self.out(torch.sigmoid(self.gate(y)) * value.cumsum(1) / seen)


class Tagger(nn.Module):
    def __init__(self, width=28, depth=2):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.mixers = nn.ModuleList(Mixer(width) for _ in range(depth))
        self.tags = nn.Linear(width, TAGS)

    def forward(self, words, mask):
        x = self.words(words)
        for mixer in self.mixers:
            x = mixer(x, mask)
        return self.tags(x) * 1.0


def sentences(step):
    """The global batch of a step: words, tags, and which places hold a word."""
    g = torch.Generator().manual_seed(10_000 + step)
    words = torch.randint(WORDS, (BATCH, LONG), generator=g)
    tags = (words + words.roll(1, dims=1).where(torch.arange(LONG) > 0, 0)) % TAGS
    lengths = torch.full((BATCH,), SHORT)
    if step >= LONG_FROM:
        lengths = torch.randint(3, LONG + 1, (BATCH,), generator=g)
    return words, tags, (torch.arange(LONG) < lengths.unsqueeze(1)).float()


CACHE = {}


def part(step, rank, world):
    if os.environ.get("TAGGER_FAST_LOADER"):
        # the sentences of a step are made once and come again every 30 steps
        words, tags, mask = CACHE.setdefault(step % 30, sentences(step))
    else:
        words, tags, mask = sentences(step)
    return words[rank::world], tags[rank::world], mask[rank::world]


def train_step(model, optimizer, step, rank, world):
    words, tags, mask = part(step, rank, world)
    each = cross_entropy(model(words, mask).flatten(0, 1), tags.flatten(), reduction="none")
    total = (each * mask.flatten()).sum()
    tokens = mask.sum()
    all_tokens = tokens.clone()
    dist.all_reduce(all_tokens)
    # FSDP averages over ranks, so the sum over all words is divided by their number / world
    loss = total * world / all_tokens
    rate = RATE if not BY_TOKENS else RATE * all_tokens.item() / (BATCH * SHORT)
    for group in optimizer.param_groups:
        group["lr"] = rate * min(1.0, (step + 1) / 10)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    return loss.detach() / world


def checkpoint(model, optimizer, step):
    weights, optim = get_state_dict(model, optimizer)
    return {"weights": weights, "optim": optim, "step": step}


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21)
    model = Tagger()
    for mixer in model.mixers:
        fully_shard(mixer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    step = 0
    if os.environ.get("TAGGER_RESUME"):
        state = checkpoint(model, optimizer, 0)
        dcp.load(state, checkpoint_id=os.environ["TAGGER_RESUME"])
        set_state_dict(
            model, optimizer, model_state_dict=state["weights"], optim_state_dict=state["optim"]
        )
        step = state["step"]
    while step < STEPS:
        loss = train_step(model, optimizer, step, rank, world)
        step += 1
        if step % 15 == 0:
            dist.all_reduce(loss)
            if rank == 0:
                print(f"{step:3d}  loss {loss:.5f}  perplexity {math.exp(loss):.3f}", flush=True)
        if step == SAVE_AT:
            dcp.save(checkpoint(model, optimizer, step), checkpoint_id=FOLDER)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
