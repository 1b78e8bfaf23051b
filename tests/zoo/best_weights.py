"""A tied GPT made on the meta device; an average of its weights is evaluated, and the best weights so far are kept in memory."""

import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

VOCAB, SEQ, WIDTH = 32, 12, 32
GLOBAL_BATCH, SAMPLES, STEPS, EVAL_EVERY = 16, 128, 16, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(SEQ, SEQ, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + F.linear(self.norm(x).transpose(1, 2), self.mix.weight.tril()).transpose(1, 2)
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.tie()

    def tie(self):
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build():
    with torch.device("meta"):
        model = GPT()
    model.to_empty(device="cpu")
    model.tie()
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.3)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, nn.Linear) and module is not model.head:
            nn.init.xavier_normal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def make_sequences(samples, name):
    gen = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    tokens = [torch.randint(0, VOCAB, (samples,), generator=gen)]
    for _ in range(SEQ):
        tokens.append((5 * tokens[-1] + 3 + torch.randint(0, 2, (samples,), generator=gen)) % VOCAB)
    return torch.stack(tokens, dim=1)


def order_of(epoch):
    gen = torch.Generator().manual_seed(zlib.crc32(b"order") + epoch)
    return torch.randperm(SAMPLES, generator=gen)


def loss_of(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def evaluate(model, average, batch):
    mine = get_model_state_dict(model)
    kept = {name: tensor.clone() for name, tensor in mine.items()}
    set_model_state_dict(model, average)
    value = loss_of(model, batch)
    set_model_state_dict(model, kept)
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = {name: tensor.clone() for name, tensor in get_model_state_dict(model).items()}
    best_value, best = float("inf"), None

    train, held_out = make_sequences(SAMPLES, "train"), make_sequences(32, "held out")
    held_out = held_out[rank * 32 // world : (rank + 1) * 32 // world]
    local, per_epoch = GLOBAL_BATCH // world, SAMPLES // GLOBAL_BATCH
    for step in range(STEPS):
        epoch, place = divmod(step, per_epoch)
        start = place * GLOBAL_BATCH + rank * local
        loss = loss_of(model, train[order_of(epoch)[start : start + local]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for name, tensor in get_model_state_dict(model).items():
                average[name].lerp_(tensor, 0.2)
        if (step + 1) % EVAL_EVERY == 0:
            value = evaluate(model, average, held_out)
            if value < best_value:
                best_value = value
                best = {name: tensor.clone() for name, tensor in get_model_state_dict(model).items()}
            if rank == 0:
                print(f"step {step + 1} loss {loss.item():.4f} held out {value:.4f} best {best_value:.4f}", flush=True)
    set_model_state_dict(model, best)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
