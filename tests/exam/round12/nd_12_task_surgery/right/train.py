"""Multi-task regression of robot quantities with gradient surgery (PCGrad).

Each task gets a backward pass of its own. Conflicting task gradients are projected on each other's normal plane;
the geometry is taken over the whole parameter vector although every rank holds a part of it only.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

TASKS = ("torque", "slip", "energy")
GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)


class SharedTrunk(nn.Module):
    def __init__(self, dim=12, hidden=32):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(dim, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.heads = nn.ModuleDict({t: nn.Linear(hidden, 4) for t in TASKS})

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))


def make_batch(step, size, dim=12):
    g = torch.Generator().manual_seed(6)
    maps = torch.randn(len(TASKS), dim, 4, generator=g) / dim ** 0.5
    x = torch.randn(size, dim, generator=torch.Generator().manual_seed(300 + step))
    return x, {"torque": torch.sin(2 * x @ maps[0]), "slip": -torch.sin(2 * x @ maps[0]) + 0.3 * x @ maps[1],
               "energy": (x @ maps[2]).pow(2)}


class Surgeon:
    def __init__(self, params):
        self.params = list(params)
        self.grads = []

    def take(self):
        """Move the gradient of the backward pass just made out of the parameters."""
        self.grads.append([None if p.grad is None else p.grad.to_local().clone() for p in self.params])
        for p in self.params:
            p.grad = None

    def products(self):
        n = len(self.grads)
        table = torch.zeros(n, n, dtype=torch.float64)
        for i in range(n):
            for j in range(n):
                for a, b in zip(self.grads[i], self.grads[j]):
                    if a is not None and b is not None:
                        table[i, j] += (a.double() * b.double()).sum()
        dist.all_reduce(table)
        return table

    def operate(self, order):
        """Project, sum, and put the result back; returns how many pairs were in conflict."""
        dots = self.products()
        mix, conflicts = torch.eye(len(self.grads), dtype=torch.float64), 0
        for i in range(len(self.grads)):
            for j in order:
                along = mix[i] @ dots[:, j]
                if j != i and along < 0:
                    mix[i, j] -= along / dots[j, j]
                    conflicts += 1
        weights = mix.sum(0)
        for k, p in enumerate(self.params):
            parts = [w.item() * g[k] for w, g in zip(weights, self.grads) if g[k] is not None]
            p.grad = torch.zeros_like(p)
            p.grad.to_local().copy_(sum(parts))
        self.grads = []
        return conflicts


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--ckpt-dir", default="")
    ap.add_argument("--ckpt-step", type=int, default=0)
    ap.add_argument("--from-ckpt", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(30)
    model = fully_shard(SharedTrunk())
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8)
    surgeon, step = Surgeon(model.parameters()), 0
    if args.from_ckpt:
        blob = torch.load(os.path.join(args.from_ckpt, "surgery.pt"))
        set_state_dict(model, opt, model_state_dict=blob["model"], optim_state_dict=blob["opt"],
                       options=StateDictOptions(full_state_dict=True))
        step = blob["step"]

    while step < args.steps:
        x, targets = make_batch(step, args.batch)
        x = x.chunk(world)[rank]
        losses = []
        for task in TASKS:
            loss = (model(x, task) - targets[task].chunk(world)[rank]).pow(2).mean()
            loss.backward()
            surgeon.take()
            losses.append(loss.detach())
        order = torch.randperm(len(TASKS), generator=torch.Generator().manual_seed(step)).tolist()
        conflicts = surgeon.operate(order)
        opt.step()
        opt.zero_grad()
        step += 1
        shown = torch.stack(losses)
        dist.all_reduce(shown)
        if rank == 0 and (step % 5 == 1 or step == args.steps):
            each = " ".join(f"{t} {v:.4f}" for t, v in zip(TASKS, (shown / world).tolist()))
            print(f"{step:3d} loss {shown.sum().item() / world:.4f} ({each}) conflicts {conflicts}", flush=True)
        if step == args.ckpt_step:
            m, o = get_state_dict(model, opt, options=GATHERED)
            if rank == 0:
                os.makedirs(args.ckpt_dir, exist_ok=True)
                torch.save({"model": m, "opt": o, "step": step}, os.path.join(args.ckpt_dir, "surgery.pt"))
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
