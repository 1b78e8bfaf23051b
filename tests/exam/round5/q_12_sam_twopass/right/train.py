"""Sharpness-aware minimisation (two passes per step, closure style) with EMA of the weights."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def shard(t):
    return t.to_local() if isinstance(t, DTensor) else t


class SAM:
    """Wraps a base optimizer: climb rho along the global gradient, take the gradient there, step from the old point."""

    def __init__(self, params, base, rho=0.05):
        self.params, self.base, self.rho = list(params), base, rho

    @torch.no_grad()
    def _climb(self):
        grads = [shard(p.grad) for p in self.params]
        sq = sum(g.square().sum() for g in grads)
        dist.all_reduce(sq)
        scale = self.rho / (sq.sqrt() + 1e-12)
        before = []
        for p, g in zip(self.params, grads):
            before.append(shard(p).clone())
            shard(p).add_(g * scale)
        return before

    def step(self, closure):
        self.base.zero_grad()
        loss = closure()
        before = self._climb()
        self.base.zero_grad()
        closure()
        with torch.no_grad():
            for p, old in zip(self.params, before):
                shard(p).copy_(old)
        self.base.step()
        return loss


class Averager:
    def __init__(self, model, decay):
        self.model, self.decay = model, decay
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self):
        for n, p in self.model.named_parameters():
            shard(self.shadow[n]).lerp_(shard(p), 1 - self.decay)


class Unit(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm = nn.GroupNorm(4, c)
        self.dw = nn.Conv2d(c, c, 5, padding=2, groups=c)
        self.mlp = nn.Sequential(nn.Conv2d(c, 2 * c, 1), nn.GELU(), nn.Conv2d(2 * c, c, 1))

    def forward(self, x):
        return x + self.mlp(self.norm(self.dw(x)))


class ConvNextish(nn.Module):
    def __init__(self, c=16, depth=2, classes=4):
        super().__init__()
        self.stem = nn.Conv2d(1, c, 2, 2)
        self.units = nn.ModuleList(Unit(c) for _ in range(depth))
        self.norm = nn.LayerNorm(c)
        self.head = nn.Linear(c, classes)

    def forward(self, x):
        x = self.stem(x)
        for u in self.units:
            x = u(x)
        return self.head(self.norm(x.mean((2, 3))))


def shapes(n, seed):
    """Crosses, bars, rings and blobs."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (n,), generator=g)
    c = 0.4 * torch.rand(n, 2, 1, 1, generator=g) - 0.2
    r = torch.linspace(-1, 1, 12)
    a, b = r[None, :, None] - c[:, 0], r[None, None, :] - c[:, 1]
    kinds = torch.stack([
        torch.maximum(torch.exp(-a.square() / 0.02) + 0 * b, torch.exp(-b.square() / 0.02) + 0 * a),
        torch.exp(-a.square() / 0.02) + 0 * b,
        torch.exp(-((a.square() + b.square()).sqrt() - 0.5).square() / 0.02),
        torch.exp(-(a.square() + b.square()) / 0.1),
    ])
    return kinds[y, torch.arange(n)][:, None] + 0.3 * torch.randn(n, 1, 12, 12, generator=g), y


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = ConvNextish()
    for u in model.units:
        fully_shard(u)
    fully_shard(model)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    sam = SAM(model.parameters(), base)
    ema = Averager(model, 0.9)

    def everything():
        m, o = get_state_dict(model, base)
        return {"model": m, "opt": o, "ema": ema.shadow}

    done = 0
    if a.resume:
        done = max(int(d) for d in os.listdir(a.resume))
        state = everything()
        dcp.load(state, checkpoint_id=f"{a.resume}/{done}")
        set_state_dict(model, base, model_state_dict=state["model"], optim_state_dict=state["opt"])
        ema.shadow = state["ema"]

    x, y = shapes(160, 1)
    while done < a.steps:
        lo = done * a.batch % len(y)
        mine = slice(lo + rank * a.batch // world, lo + (rank + 1) * a.batch // world)

        def closure():
            loss = F.cross_entropy(model(x[mine]), y[mine])
            loss.backward()
            return loss.detach()

        loss = sam.step(closure)
        ema.update()
        done += 1
        dist.all_reduce(loss)
        if rank == 0 and done % 4 == 0:
            print(f"{done} loss {loss.item() / world:.4f}", flush=True)
        if a.save_every and done % a.save_every == 0:
            dcp.save(everything(), checkpoint_id=f"{a.out}/{done}")

    if a.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        avg = {n: (t.full_tensor() if isinstance(t, DTensor) else t) for n, t in ema.shadow.items()}
        if rank == 0:
            torch.save({"model": full, "ema": avg}, a.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
