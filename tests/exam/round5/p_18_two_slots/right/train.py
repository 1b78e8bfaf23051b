import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

from ramp import micro_batches, rows
from slots import Slots


class Net(nn.Module):
    def __init__(self, h=24):
        super().__init__()
        self.inp = nn.Linear(9, h)
        self.deep = nn.ModuleList(nn.Sequential(nn.LayerNorm(h), nn.Linear(h, h), nn.Mish()) for _ in range(2))
        self.out = nn.Linear(h, 2)

    def forward(self, x):
        x = self.inp(x)
        for l in self.deep:
            x = x + l(x)
        return self.out(x)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--micro", type=int, default=16)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="slots")
    ap.add_argument("--resume", default=None)
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(15)
    model = Net()
    for l in model.deep:
        fully_shard(l)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=a.lr)
    slots = Slots(a.out, model, opt)
    step = samples = 0
    if a.resume:
        step, samples = slots.load(a.resume)
    while step < a.steps:
        n = micro_batches(step)
        total = torch.zeros(())
        for k in range(n):
            model.set_requires_gradient_sync(k == n - 1)
            x, y = (t.chunk(world)[rank] for t in rows(samples, a.micro))
            loss = (model(x) - y).square().mean() / n
            loss.backward()
            total += loss.detach()
            samples += a.micro
        opt.step()
        opt.zero_grad()
        step += 1
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {total.item() / world:.4f} batch {n * a.micro} samples {samples}", flush=True)
        if a.save_every and step % a.save_every == 0:
            slots.save(step=step, samples=samples)
    slots.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
