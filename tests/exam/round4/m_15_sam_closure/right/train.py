"""Sharpness-aware minimisation as an optimizer wrapper that is given a closure, on sharded parameters."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict)
from torch.distributed.fsdp import fully_shard


class SAM:
    def __init__(self, params, base, rho=0.05):
        self.params, self.base, self.rho = list(params), base, rho

    @torch.no_grad()
    def _climb(self):
        norm = nn.utils.get_total_norm([p.grad for p in self.params]).full_tensor()
        moved = []
        for p in self.params:
            e = p.grad * (self.rho / (norm.item() + 1e-12))
            p.add_(e)
            moved.append(e)
        return moved

    def step(self, closure):
        first = closure()
        moved = self._climb()
        self.base.zero_grad()
        second = closure()
        with torch.no_grad():
            for p, e in zip(self.params, moved):
                p.sub_(e)
        self.base.step()
        self.base.zero_grad()
        return first, second


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(2, 24)
        self.g = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))
        self.h = nn.Linear(24, 3)

    def forward(self, x):
        x = torch.sin(self.f(x))
        for g in self.g:
            x = x + torch.tanh(g(x))
        return self.h(x)


def spirals(n=600):
    g = torch.Generator().manual_seed(14)
    y = torch.arange(n) % 3
    r = torch.rand(n, generator=g) * 2 + 0.2
    a = 2.0 * r + y * 2.0944 + 0.1 * torch.randn(n, generator=g)
    return torch.stack([r * a.cos(), r * a.sin()], 1), y


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--stop-at", type=int, default=0)
    ap.add_argument("--batch", type=int, default=60)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    model = Net()
    for g in model.g:
        fully_shard(g)
    fully_shard(model)
    base = torch.optim.SGD(model.parameters(), lr=0.15, momentum=0.9)
    sched = torch.optim.lr_scheduler.PolynomialLR(base, total_iters=a.steps + 5, power=1.0)
    sam = SAM(model.parameters(), base)
    X, Y = spirals()

    step = 0
    if a.resume:
        m, o = get_state_dict(model, base)
        st = {"m": m, "o": o, "sched": sched.state_dict(), "step": 0}
        dcp.load(st, checkpoint_id=os.path.join(a.resume, sorted(os.listdir(a.resume))[-1]))
        set_state_dict(model, base, model_state_dict=st["m"], optim_state_dict=st["o"])
        sched.load_state_dict(st["sched"])
        step = st["step"]

    while step < (a.stop_at or a.steps):
        pick = torch.randperm(len(X), generator=torch.Generator().manual_seed(step))[:a.batch].chunk(world)[rank]

        def closure():
            loss = F.cross_entropy(model(X[pick]), Y[pick])
            loss.backward()
            return loss.detach()

        pair = torch.stack(sam.step(closure))
        sched.step()
        step += 1
        dist.all_reduce(pair)
        pair /= world
        if rank == 0:
            print(f"step {step} loss {pair[0]:.4f} sharp {pair[1] - pair[0]:+.4f}", flush=True)
        if a.save_every and step % a.save_every == 0:
            m, o = get_state_dict(model, base)
            dcp.save({"m": m, "o": o, "sched": sched.state_dict(), "step": step}, checkpoint_id=f"{a.out}/{step:06d}")

    sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0 and a.export:
        torch.save(sd, a.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
