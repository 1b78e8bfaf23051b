"""Training without backward: central differences along random directions that are drawn again from a seed (MeZO).
Only the seed and one number per direction are kept; every rank draws the whole direction and takes its shard."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

torch.set_default_dtype(torch.float64)


class Small(nn.Module):
    def __init__(self, d=6, h=16):
        super().__init__()
        self.a = nn.Linear(d, h)
        self.b = nn.Sequential(nn.Linear(h, h), nn.Tanh())
        self.c = nn.Linear(h, 1)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return self.c(h + self.b(h)).squeeze(-1)


def batch(step, n):
    g = torch.Generator().manual_seed(606 + step)
    x = torch.randn(n, 6, generator=g)
    return x, 2 * x[:, 0] - x[:, 1] * 0.5 + x[:, 2] + 1


class Mezo:
    def __init__(self, params, eps, lr, momentum_dirs):
        self.params, self.eps, self.lr, self.dirs = params, eps, lr, momentum_dirs

    @torch.no_grad()
    def move(self, seed, amount):
        g = torch.Generator().manual_seed(seed)
        for p in self.params:
            z = torch.randn(p.shape, generator=g)
            if isinstance(p, DTensor):
                z = DTensor.from_local(z, p.device_mesh, [Replicate()], run_check=False).redistribute(placements=p.placements)
            p.add_(z, alpha=amount)

    def step(self, step, loss_fn):
        coeffs, losses = [], []
        for k in range(self.dirs):
            seed = 1_000_000 + step * self.dirs + k
            self.move(seed, self.eps)
            up = loss_fn()
            self.move(seed, -2 * self.eps)
            down = loss_fn()
            self.move(seed, self.eps)
            coeffs.append((up - down) / (2 * self.eps))
            losses.append((up + down) / 2)
        for k, c in enumerate(coeffs):
            self.move(1_000_000 + step * self.dirs + k, -self.lr * c / self.dirs)
        return sum(losses) / len(losses)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--eps", type=float, default=1e-3)
    ap.add_argument("--dirs", type=int, default=4)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="mezo")
    ap.add_argument("--resume", default=None)
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    model = Small()
    fully_shard(model.b, reshard_after_forward=True)
    # there is no backward that would reshard the root
    fully_shard(model, reshard_after_forward=True)
    model.requires_grad_(False)
    mezo = Mezo(list(model.parameters()), a.eps, a.lr, a.dirs)
    start = 0
    if a.resume:
        start = max(int(d.split("-")[1]) for d in os.listdir(a.resume))
        sd = {"model": model.state_dict()}
        dcp.load(sd, checkpoint_id=os.path.join(a.resume, f"step-{start}"))
        model.load_state_dict(sd["model"])
    for step in range(start, a.steps):
        x, y = (t.chunk(world)[rank] for t in batch(step, a.batch))

        def loss_fn():
            with torch.no_grad():
                l = (model(x) - y).square().mean()
            dist.all_reduce(l)
            return l.item() / world

        loss = mezo.step(step, loss_fn)
        if rank == 0:
            print(f"step {step + 1} loss {loss:.4f}", flush=True)
        if a.save_every and (step + 1) % a.save_every == 0:
            dcp.save({"model": model.state_dict()}, checkpoint_id=os.path.join(a.out, f"step-{step + 1}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
