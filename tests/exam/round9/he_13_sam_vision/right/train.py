"""Sharpness-aware minimisation of a small patch network: two backward passes for every update."""
import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class PatchNet(nn.Module):
    def __init__(self, dim=32, classes=4):
        super().__init__()
        self.stem = nn.Conv2d(1, dim, 4, stride=4)
        self.norm = nn.GroupNorm(4, dim)
        self.mix = nn.Conv2d(dim, dim, 3, padding=1)
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = F.gelu(self.norm(self.stem(x)))
        x = x + F.gelu(self.mix(x))
        return self.head(x.mean(dim=(2, 3)))


def pictures(n, seed):
    """Gratings in four directions."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    angle = y.float() * 0.785
    r = torch.arange(16.0)
    phase = 6.28 * torch.rand(n, 1, 1, generator=g)
    wave = torch.cos(angle)[:, None, None] * r[None, None] + torch.sin(angle)[:, None, None] * r[None, :, None]
    return (torch.sin(1.3 * wave + phase) + 0.4 * torch.randn(n, 16, 16, generator=g))[:, None], y


def grad_norm(params):
    total = torch.nn.utils.get_total_norm([p.grad for p in params])
    return total.full_tensor() if isinstance(total, DTensor) else total


class SAM:
    """Wraps an optimizer: climb to the worst point within rho, take the gradient there, step from the start."""

    def __init__(self, params, base, rho):
        self.params, self.base, self.rho = list(params), base, rho

    @contextlib.contextmanager
    def perturbed(self):
        with torch.no_grad():
            saved = [p.detach().clone() for p in self.params]
            scale = (self.rho / (grad_norm(self.params) + 1e-12)).item()
            for p in self.params:
                p.add_(p.grad, alpha=scale)
        self.base.zero_grad()
        try:
            yield
        finally:
            with torch.no_grad():
                for p, w in zip(self.params, saved):
                    p.copy_(w)

    def step(self, compute_loss):
        self.base.zero_grad()
        loss = compute_loss()
        loss.backward()
        with self.perturbed():
            compute_loss().backward()
        self.base.step()
        return loss.detach()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(14)
    model = PatchNet()
    fully_shard(model.mix)
    fully_shard(model)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.OneCycleLR(base, max_lr=0.2, total_steps=args.steps)
    sam = SAM(model.parameters(), base, rho=0.05)

    first = 0
    if args.resume:
        newest = max(int(d.split("=")[1]) for d in os.listdir(args.resume))
        m, o = get_state_dict(model, base)
        state = {"model": m, "optim": o, "sched": sched.state_dict(), "next": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, f"step={newest}"))
        set_state_dict(model, base, model_state_dict=state["model"], optim_state_dict=state["optim"])
        sched.load_state_dict(state["sched"])
        first = state["next"]

    for step in range(first, args.steps):
        x, y = pictures(32, 400 + step)
        x, y = x[rank::world], y[rank::world]
        loss = sam.step(lambda: F.cross_entropy(model(x), y))
        sched.step()
        dist.all_reduce(loss)
        if rank == 0 and step % 4 == 0:
            print(f"step {step} loss {loss.item() / world:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            m, o = get_state_dict(model, base)
            state = {"model": m, "optim": o, "sched": sched.state_dict(), "next": step + 1}
            dcp.save(state, checkpoint_id=os.path.join(args.out, f"step={step + 1}"))

    if args.export:
        full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
