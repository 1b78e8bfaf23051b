"""Supervised fine-tuning on conversations of very different length.

Gradients are summed, over tokens, micro-batches and ranks, and divided by the number of trained tokens in the whole
step when that number is known, i.e. after the last backward.
"""
import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

IGNORE = -100
VOCAB, DIM, LONGEST = 40, 32, 30


class Cell(nn.Module):
    """Gated causal convolution and MLP."""

    def __init__(self, d, width=4):
        super().__init__()
        self.width = width
        self.n1, self.n2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.conv = nn.Conv1d(d, 2 * d, width)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        h = F.pad(self.n1(x).transpose(1, 2), (self.width - 1, 0))
        a, b = self.conv(h).transpose(1, 2).chunk(2, -1)
        x = x + a * b.sigmoid()
        return x + self.ff(self.n2(x))


class ConvLM(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.cells = nn.ModuleList(Cell(DIM) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for c in self.cells:
            x = c(x)
        return self.head(self.norm(x))


def conversation(i):
    g = torch.Generator().manual_seed(3000 + i)
    n = int(3 + 24 * torch.rand((), generator=g) ** 3)
    question = torch.randint(1, VOCAB // 2, (3,), generator=g)
    answer = (question.repeat(n // 3 + 1)[:n] + VOCAB // 2) % VOCAB
    return torch.cat([question, answer]), torch.cat([torch.full((3,), IGNORE), answer])


def collate(items):
    width = max(len(x) for x, _ in items)
    pad = lambda t, v: F.pad(t, (0, width - len(t)), value=v)  # noqa: E731
    return torch.stack([pad(x, 0) for x, _ in items]), torch.stack([pad(y, IGNORE) for _, y in items])


def step_batches(step, per_step, micro_batches, rank, world):
    """This rank's micro-batches: its conversations in order of length, to waste little padding."""
    mine = sorted((conversation(step * per_step + i) for i in range(rank, per_step, world)), key=lambda c: len(c[0]))
    size = len(mine) // micro_batches
    return [collate(mine[i * size : (i + 1) * size]) for i in range(micro_batches)]


@torch.no_grad()
def divide_and_clip(params, tokens, limit):
    square = torch.zeros(())
    for p in params:
        g = p.grad.to_local()
        g.div_(tokens)
        square += g.square().sum()
    dist.all_reduce(square)
    factor = (limit / (square.sqrt() + 1e-6)).clamp(max=1.0)
    for p in params:
        p.grad.to_local().mul_(factor)


def store(folder, step, model, opt):
    """Full tensors in one file, written by rank 0."""
    params = dict(model.named_parameters())
    state = {"w": {n: p.detach().full_tensor() for n, p in params.items()}}
    state["m"] = {n: opt.state[p]["momentum_buffer"].full_tensor() for n, p in params.items()}
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        torch.save(state, f"{folder}/sft.pt")
        with open(f"{folder}/sft.json", "w") as f:
            json.dump({"step": step}, f)
    dist.barrier()


@torch.no_grad()
def fetch(folder, model, opt):
    state = torch.load(f"{folder}/sft.pt")
    for n, p in model.named_parameters():
        p.copy_(distribute_tensor(state["w"][n], p.device_mesh, p.placements))
        opt.state[p]["momentum_buffer"] = distribute_tensor(state["m"][n], p.device_mesh, p.placements)
    with open(f"{folder}/sft.json") as f:
        return json.load(f)["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--per-step", type=int, default=16)
    ap.add_argument("--micro-batches", type=int, default=2)
    ap.add_argument("--save-at", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    model = ConvLM()
    for c in model.cells:
        fully_shard(c)
    fully_shard(model)
    for m in (*model.cells, model):
        m.set_force_sum_reduction_for_comms(True)
        m.set_gradient_divide_factor(1.0)
    params = list(model.parameters())
    opt = torch.optim.SGD(params, lr=0.5, momentum=0.9)
    begin = fetch(args.resume, model, opt) if args.resume else 0

    for step in range(begin, args.steps):
        seen = torch.zeros(2, dtype=torch.float64)
        for k, (ids, labels) in enumerate(step_batches(step, args.per_step, args.micro_batches, rank, world)):
            model.set_requires_gradient_sync(k == args.micro_batches - 1)
            logits = model(ids[:, :-1]).flatten(0, 1)
            loss = F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=IGNORE, reduction="sum")
            loss.backward()
            seen += torch.tensor([loss.item(), (labels[:, 1:] != IGNORE).sum().item()], dtype=torch.float64)
        dist.all_reduce(seen)
        divide_and_clip(params, seen[1].float(), limit=1.0)
        opt.step()
        opt.zero_grad()
        if rank == 0 and step % 2 == 1:
            print(f"step {step + 1} tokens {int(seen[1])} loss {seen[0] / seen[1]:.4f}", flush=True)
        if step + 1 == args.save_at:
            store(args.out, step + 1, model, opt)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
