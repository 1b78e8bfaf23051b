"""Language model with tied embeddings, chunked loss, sequences of very different length and accumulation."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from chunked import chunked_cross_entropy

VOCAB, CTX, MICRO, ACCUM, STEPS = 40, 20, 8, 3, 16
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Mix(nn.Module):
    """Causal mean of the past and an MLP."""

    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.gate = nn.Linear(dim, dim)
        self.up = nn.Linear(2 * dim, 3 * dim)
        self.down = nn.Linear(3 * dim, dim)

    def forward(self, x):
        h = self.norm(x)
        past = (h * torch.sigmoid(self.gate(h))).cumsum(1) / torch.arange(1, x.shape[1] + 1)[None, :, None]
        return x + self.down(torch.relu(self.up(torch.cat([h, past], dim=-1))))


class TiedLM(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        nn.init.normal_(self.emb.weight, std=0.3)
        self.blocks = nn.ModuleList(Mix(dim) for _ in range(2))
        self.norm = nn.LayerNorm(dim)

    def forward(self, ids, target):
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        # the loss belongs to the forward: the embedding is whole only here
        return chunked_cross_entropy(self.norm(x), self.emb.weight, target)


def micro_batch(step, micro):
    g = torch.Generator().manual_seed(1000 * step + micro)
    length = torch.randint(2, CTX + 1, (MICRO, 1), generator=g)
    start = torch.randint(0, VOCAB, (MICRO, 1), generator=g)
    jump = torch.randint(1, 4, (MICRO, 1), generator=g)
    ids = (start + jump * torch.arange(CTX + 1)) % VOCAB
    target = ids[:, 1:].masked_fill(torch.arange(CTX)[None] >= length, -100)
    return ids[:, :-1], target


def save(folder, step, model, opt, rank):
    state = {"model": get_model_state_dict(model, options=FULL), "optim": get_optimizer_state_dict(model, opt, options=FULL)}
    if rank == 0:
        os.makedirs(folder, exist_ok=True)
        part = os.path.join(folder, f"step{step}.tmp")
        torch.save(state, part)
        os.replace(part, os.path.join(folder, f"step{step}.pt"))
    dist.barrier()


def load(folder, model, opt):
    """The files hold whole tensors, so they can be read at any number of ranks."""
    step = max(int(f[4:-3]) for f in os.listdir(folder) if f.endswith(".pt"))
    state = torch.load(os.path.join(folder, f"step{step}.pt"), weights_only=True)
    set_model_state_dict(model, state["model"], options=FULL)
    set_optimizer_state_dict(model, opt, state["optim"], options=FULL)
    return step


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(27)
    model = TiedLM()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    start = load(args.resume, model, opt) if args.resume else 0

    for step in range(start, STEPS):
        micros = [tuple(t[rank::world] for t in micro_batch(step, m)) for m in range(ACCUM)]
        tokens = torch.tensor(float(sum((target >= 0).sum() for _, target in micros)))
        dist.all_reduce(tokens)
        shown = torch.zeros(())
        opt.zero_grad()
        for i, (ids, target) in enumerate(micros):
            model.set_requires_gradient_sync(i == ACCUM - 1)
            loss_sum = model(ids, target)
            # FSDP divides by the number of ranks; the loss is a mean over all tokens of all ranks
            (loss_sum * world / tokens).backward()
            shown += loss_sum.detach()
        opt.step()
        dist.all_reduce(shown)
        if rank == 0 and step % 3 == 0:
            print(f"step {step} tokens {int(tokens)} loss {(shown / tokens).item():.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save(args.out, step + 1, model, opt, rank)

    if args.export:
        full = get_model_state_dict(model, options=FULL)
        if rank == 0:
            torch.save(full, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
