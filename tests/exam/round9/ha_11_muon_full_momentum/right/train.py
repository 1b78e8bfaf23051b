import argparse
import glob
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from muon import MuonWithAdam

VOCAB, LENGTH, DIM = 36, 20, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(3 * DIM, DIM, bias=False)

    def forward(self, x):
        h = self.ln1(x)
        split = lambda t: t.unflatten(-1, (4, -1)).transpose(1, 2)
        a = F.scaled_dot_product_attention(split(self.q(h)), split(self.k(h)), split(self.v(h)), is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.ln2(x))).square())


class LM(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.pos = nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.ln = nn.RMSNorm(DIM)
        self.out = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight
        for block in self.blocks:
            x = block(x)
        return self.out(self.ln(x))


def batches(size, rank, world, start=0):
    """Copy task: a random word, repeated; yields this rank's rows for ever."""
    step = start
    while True:
        g = torch.Generator().manual_seed(5_000 + step)
        period = 3 + step % 4
        word = torch.randint(0, VOCAB, (size, period), generator=g)
        rows = word.repeat(1, LENGTH)[:, :LENGTH + 1][rank::world]
        yield rows[:, :-1], rows[:, 1:]
        step += 1


def schedule(optimizer, step, total):
    factor = min(1.0, (step + 1) / 3) * 0.5 * (1 + math.cos(math.pi * step / total))
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor


def full(value):
    return value.full_tensor().clone() if isinstance(value, DTensor) else value


def save(path, step, model, optimizer, rank):
    """One whole file, written by rank 0; can be read at any number of ranks."""
    payload = {"step": step, "model": {}, "optim": {}}
    for name, p in model.named_parameters():
        payload["model"][name] = full(p.detach())
        payload["optim"][name] = {k: full(v) for k, v in optimizer.state[p].items()}
    if rank == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save(payload, path + ".part")
        os.replace(path + ".part", path)
    dist.barrier()


def load(folder, model, optimizer):
    payload = torch.load(sorted(glob.glob(os.path.join(folder, "step*.pt")))[-1])
    for name, p in model.named_parameters():
        like = lambda t: distribute_tensor(t, p.device_mesh, p.placements)
        with torch.no_grad():
            p.copy_(like(payload["model"][name]))
        optimizer.state[p] = {k: v if k == "count" else like(v) for k, v in payload["optim"][name].items()}
    return payload["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=18)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--folder", default="checkpoints")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(6)
    model = LM()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    matrices = [p for n, p in model.named_parameters() if n.startswith("blocks.") and p.ndim == 2]
    taken = {id(p) for p in matrices}
    optimizer = MuonWithAdam(matrices, [p for p in model.parameters() if id(p) not in taken])
    for group in optimizer.param_groups:
        group["base_lr"] = group["lr"]

    first = load(args.resume, model, optimizer) if args.resume else 0
    stream = batches(args.batch, rank, world, start=first)
    for step in range(first, args.steps):
        ids, targets = next(stream)
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        schedule(optimizer, step, args.steps)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step + 1:2d} loss {mean.item():.5f}")
        if args.save_every and (step + 1) % args.save_every == 0 and step + 1 < args.steps:
            save(os.path.join(args.folder, f"step{step + 1:05d}.pt"), step + 1, model, optimizer, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
