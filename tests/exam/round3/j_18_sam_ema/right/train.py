"""Sharpness-aware minimisation (two closures per step) around AdamW, with an average of the weights for evaluation."""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard


class SAM:
    """Not an Optimizer of its own: it wraps one, so that the checkpoint is that of the inner optimizer."""

    def __init__(self, inner, rho):
        self.inner, self.rho = inner, rho

    def _live(self):
        return [p for g in self.inner.param_groups for p in g["params"] if p.grad is not None]

    @torch.no_grad()
    def _global_norm(self, params):
        total = sum(p.grad.to_local().double().square().sum() for p in params)
        dist.all_reduce(total)
        return total.sqrt().item()

    def step(self, closure):
        first = closure()
        params = self._live()
        scale = self.rho / (self._global_norm(params) + 1e-12)
        with torch.no_grad():
            bumps = [scale * p.grad.to_local() for p in params]
            kept = [p.to_local().clone() for p in params]
            for p, b in zip(params, bumps):
                p.to_local().add_(b)
        self.inner.zero_grad()
        closure()
        with torch.no_grad():
            for p, k in zip(params, kept):
                p.to_local().copy_(k)
        self.inner.step()
        self.inner.zero_grad()
        return first


class Average:
    def __init__(self, model, decay):
        self.model, self.decay = model, decay
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, step):
        d = min(self.decay, (1 + step) / (5 + step))
        for n, p in self.model.named_parameters():
            self.shadow[n].lerp_(p.detach(), 1 - d)

    @contextlib.contextmanager
    def applied(self):
        with torch.no_grad():
            kept = {n: p.detach().clone() for n, p in self.model.named_parameters()}
            for n, p in self.model.named_parameters():
                p.copy_(self.shadow[n])
            try:
                yield
            finally:
                for n, p in self.model.named_parameters():
                    p.copy_(kept[n])


def rings(n=1600, seed=2):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    a = 6.2832 * torch.rand(n, generator=g)
    r = 0.6 + 0.7 * y + 0.15 * torch.randn(n, generator=g)
    return torch.stack([r * a.cos(), r * a.sin()], 1), y


def build():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(2, 32), nn.SiLU(), nn.Sequential(nn.Linear(32, 32), nn.SiLU()), nn.Linear(32, 3))


@torch.no_grad()
def accuracy(model, x, y, rank, world):
    c = torch.tensor([(model(x[rank::world]).argmax(1) == y[rank::world]).sum().item(), len(y[rank::world])])
    dist.all_reduce(c)
    return (c[0] / c[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--rho", type=float, default=0.05)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="sam")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    x, y = rings()
    model = build()
    fully_shard(model[2])
    fully_shard(model)
    sam = SAM(torch.optim.AdamW(model.parameters(), lr=1e-2), args.rho)
    avg = Average(model, 0.9)

    def bundle(step):
        m, o = get_state_dict(model, sam.inner)
        return {"model": m, "optim": o, "average": avg.shadow, "step": step}

    start = 0
    if args.resume:
        state = bundle(0)
        dcp.load(state, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        set_state_dict(model, sam.inner, model_state_dict=state["model"], optim_state_dict=state["optim"])
        start = state["step"]

    for step in range(start, args.steps):
        g = torch.Generator().manual_seed(10_000 + step)
        idx = torch.randperm(len(x), generator=g)[: args.batch].tensor_split(world)[rank]

        def closure():
            loss = F.cross_entropy(model(x[idx]), y[idx])
            loss.backward()
            return loss.detach()

        loss = sam.step(closure).clone()
        avg.update(step)
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step + 1:3d}  ce {loss.item() / world:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(bundle(step + 1), checkpoint_id=os.path.join(args.out, f"{step + 1:06d}"))

    with avg.applied():
        acc = accuracy(model, x, y, rank, world)
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            print(f"accuracy of the average {acc:.4f}")
            if args.export:
                torch.save(full, args.export)  # inside: on one rank the tensors are the live ones
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
