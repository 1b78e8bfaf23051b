"""Sharpness-aware minimisation on sharded parameters: the optimizer takes a closure and evaluates it twice."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class SAM(torch.optim.SGD):
    def __init__(self, params, rho=0.05, **kw):
        super().__init__(params, **kw)
        self.rho = rho

    def _grads(self):
        return [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]

    def _global_norm(self):
        parts = [(x.to_local() if isinstance(x, DTensor) else x).square().sum() for x in self._grads()]
        total = torch.stack(parts).sum()
        if any(isinstance(x, DTensor) for x in self._grads()):
            dist.all_reduce(total)
        return total.sqrt()

    def step(self, closure=None):
        if closure is None:  # state initialisation by the checkpoint helpers
            return super().step()
        loss = closure()
        scale = self.rho / (self._global_norm().item() + 1e-12)
        before = []
        with torch.no_grad():
            for g in self.param_groups:
                for p in g["params"]:
                    if p.grad is not None:
                        before.append((p, p.detach().clone()))
                        p.add_(p.grad, alpha=scale)
        self.zero_grad()
        closure()
        with torch.no_grad():
            for p, old in before:
                p.copy_(old)
        super().step()
        return loss


class Spiral(nn.Module):
    def __init__(self, h=24):
        super().__init__()
        self.first = nn.Linear(2, h)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(h, h), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(h, 3)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        for b in self.blocks:
            h = h + b(h)
        return self.last(h)


def batch(step, n):
    g = torch.Generator().manual_seed(step + 404)
    y = torch.randint(0, 3, (n,), generator=g)
    r = torch.rand(n, generator=g)
    a = 3 * r + y * 2.094 + 0.1 * torch.randn(n, generator=g)
    return torch.stack([r * a.cos(), r * a.sin()], 1) * 2, y


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--rho", type=float, default=0.1)
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="sam")
    ap.add_argument("--resume", default=None)
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(17)
    model = Spiral()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = SAM(model.parameters(), rho=a.rho, lr=a.lr, momentum=0.9, nesterov=True, weight_decay=1e-3)
    step = 0
    if a.resume:
        step = max(int(d.split("_")[1]) for d in os.listdir(a.resume) if os.path.exists(os.path.join(a.resume, d, ".metadata")))
        m, o = get_state_dict(model, opt)
        sd = {"m": m, "o": o}
        dcp.load(sd, checkpoint_id=os.path.join(a.resume, f"at_{step}"))
        set_state_dict(model, opt, model_state_dict=sd["m"], optim_state_dict=sd["o"])
    while step < a.steps:
        x, y = (t.chunk(world)[rank] for t in batch(step, a.batch))

        def closure():
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss.detach()

        loss = opt.step(closure)
        opt.zero_grad()
        step += 1
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step} loss {loss.item() / world:.4f}", flush=True)
        if a.save_every and step % a.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"m": m, "o": o}, checkpoint_id=os.path.join(a.out, f"at_{step}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
