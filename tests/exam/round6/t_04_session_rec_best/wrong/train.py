"""Next-click model: trains, keeps the best step on validation sessions and exports it."""
import argparse
import os
import re

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from best import BestKeeper, validate
from sessions import Sessions


class Mixer(nn.Module):
    """Causal token mixing with learned decays (a small linear recurrence)."""

    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.inp = nn.Linear(dim, 2 * dim)
        self.decay = nn.Parameter(torch.linspace(-2, 3, dim))
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        v, gate = self.inp(self.norm(x)).chunk(2, dim=-1)
        a = torch.sigmoid(self.decay)
        state, outs = torch.zeros_like(v[:, 0]), []
        for t in range(v.shape[1]):
            state = a * state + (1 - a) * v[:, t]
            outs.append(state)
        return x + self.out(torch.stack(outs, 1) * F.silu(gate))


class Recommender(nn.Module):
    def __init__(self, items, dim=32):
        super().__init__()
        self.item = nn.Embedding(items, dim)
        self.mix = nn.ModuleList([Mixer(dim), Mixer(dim)])
        self.score = nn.Linear(dim, items, bias=False)

    def forward(self, seq):
        h = self.item(seq)
        for m in self.mix:
            h = m(h)
        return self.score(h)


def loss_fn(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=26)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--eval-every", type=int, default=2)
    ap.add_argument("--lr", type=float, default=5e-2)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    data = Sessions()
    torch.manual_seed(4)
    model = Recommender(data.items)
    for m in model.mix:
        fully_shard(m)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.9, 0.98), eps=1e-6)
    best = BestKeeper(model)

    step = 0
    if args.resume:
        names = [n for n in os.listdir(args.resume) if n.endswith(f".{rank}.pt")]
        newest = max(names, key=lambda n: int(re.match(r"s(\d+)", n).group(1)))
        ck = torch.load(os.path.join(args.resume, newest), weights_only=False)
        model.load_state_dict(ck["model"])
        opt.load_state_dict(ck["opt"])
        best.load_state_dict(ck["best"])
        step = ck["step"]

    per = args.batch // world
    while step < args.steps:
        rows = data.batch(step, args.batch)[rank * per : (rank + 1) * per]
        loss = loss_fn(model(rows[:, :-1]), rows[:, 1:])
        loss.backward()
        opt.step()
        opt.zero_grad()
        step += 1
        if step % args.eval_every == 0:
            value = validate(model, data.valid, loss_fn, rank, world)
            better = best.offer(value, step)
            if rank == 0:
                print(f"step {step} valid {value:.4f}{' *' if better else ''}", flush=True)
        if args.save_every and step % args.save_every == 0:
            os.makedirs(args.out, exist_ok=True)
            torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "best": best.state_dict(), "step": step},
                       os.path.join(args.out, f"s{step}.{rank}.pt"))
            dist.barrier()

    best.restore()
    final = validate(model, data.valid, loss_fn, rank, world)
    if rank == 0:
        print(f"best step {best.step} valid {best.value:.4f} exported model {final:.4f}", flush=True)
    weights = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    if args.export and rank == 0:
        torch.save(weights, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
