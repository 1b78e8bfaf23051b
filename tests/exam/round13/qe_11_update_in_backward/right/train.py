"""Restoration of noisy spectra. Each parameter is updated in the backward pass, as soon as its gradient is reduced, and the
gradient is dropped at once; there is no optimizer.step()."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

BINS = 40


class Stage(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, width)
        self.back = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return x + self.back(torch.nn.functional.gelu(self.fc(self.norm(x))))


class Restorer(nn.Module):
    def __init__(self, width=48, depth=3):
        super().__init__()
        self.enc = nn.Linear(BINS, width)
        self.stages = nn.ModuleList(Stage(width) for _ in range(depth))
        self.dec = nn.Linear(width, BINS)

    def forward(self, x):
        x = self.enc(x)
        for stage in self.stages:
            x = stage(x)
        return self.dec(x)


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


class FusedLars:
    """Momentum with layer-wise rates, run from hooks. `lr` is read when a gradient arrives."""

    def __init__(self, model, momentum=0.9, trust=0.02):
        self.lr, self.momentum, self.trust = 0.0, momentum, trust
        self.velocity = {}
        self.applied = 0
        for name, p in model.named_parameters():
            self.velocity[name] = torch.zeros_like(p, requires_grad=False)
            p.register_post_accumulate_grad_hook(lambda p, name=name: self._apply(name, p))

    @torch.no_grad()
    def _apply(self, name, p):
        grad, v = p.grad, self.velocity[name]
        rate = self.lr
        if p.ndim > 1:
            norms = torch.stack([whole(p.detach().norm()), whole(grad.norm())]).tolist()
            rate = rate * self.trust * norms[0] / (norms[1] + 1e-8)
        else:
            rate = rate * 0.05
        v.mul_(self.momentum).add_(grad, alpha=rate)
        p.sub_(v)
        p.grad = None
        self.applied += 1


def spectra(step, size):
    g = torch.Generator().manual_seed(61 * step + 3)
    x = torch.linspace(0, 1, BINS)
    at = torch.rand(size, 3, 1, generator=g)
    tall = 0.5 + torch.rand(size, 3, 1, generator=g)
    clean = (tall * torch.exp(-(((x - at) / 0.08) ** 2))).sum(1)
    return clean + 0.3 * torch.randn(size, BINS, generator=g), clean


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(8)
    model = Restorer()
    for stage in model.stages:
        fully_shard(stage)
    fully_shard(model)
    fused = FusedLars(model)
    expected = sum(1 for _ in model.parameters())

    start = 0
    if args.resume:
        state = {"model": get_model_state_dict(model), "velocity": fused.velocity, "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        set_model_state_dict(model, state["model"])
        start = state["step"]

    for step in range(start, args.steps):
        fused.lr = 1.0 * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        fused.applied = 0
        noisy, clean = (t.chunk(world)[rank] for t in spectra(step, args.batch))
        loss = (model(noisy) - clean).square().mean()
        loss.backward()
        assert fused.applied == expected
        done = step + 1
        if done % 6 == 0:
            total = loss.detach().clone()
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {done} mse {total.item() / world:.6f}", flush=True)
        if args.save_every and done % args.save_every == 0:
            state = {"model": get_model_state_dict(model), "velocity": fused.velocity, "step": done}
            dcp.save(state, checkpoint_id=os.path.join(args.out, f"{done:05d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
