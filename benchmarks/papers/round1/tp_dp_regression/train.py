"""Tabular regression with wide residual MLPs, tensor parallel x data parallel.

tp is the widest power of two whose square fits into the world, the rest of the ranks
are data parallel (FSDP2).
"""
import os
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


@dataclass
class Settings:
    features: int = 12
    dim: int = 24
    hidden: int = 64
    depth: int = 3
    batch: int = 32
    steps: int = 48
    lr: float = 3e-3
    seed: int = 21
    log_every: int = 8
    quantiles: tuple = field(default=(0.1, 0.5, 0.9))


class Parallel:
    """Where this process stands in the mesh."""

    def __init__(self):
        cuda = torch.cuda.is_available()
        dist.init_process_group("nccl" if cuda else "gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
        tp = 1
        while (2 * tp) ** 2 <= self.world and self.world % (2 * tp) == 0:
            tp *= 2
        self.mesh = init_device_mesh(self.device.type, (self.world // tp, tp), mesh_dim_names=("dp", "tp"))
        self.tp_group = self.mesh["tp"].get_group()
        self.dp_group = self.mesh["dp"].get_group()
        self.tp, self.tp_rank = tp, self.mesh["tp"].get_local_rank()
        self.dp, self.dp_rank = self.world // tp, self.mesh["dp"].get_local_rank()

    def rows(self, t):
        n = t.shape[0] // self.dp
        return t[self.dp_rank * n:(self.dp_rank + 1) * n].to(self.device)

    def dp_mean(self, t):
        t = t.detach().clone()
        dist.all_reduce(t, group=self.dp_group)
        return t.item() / self.dp


class ToParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class FromParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class ParallelMLP(nn.Module):
    def __init__(self, s, par, gen):
        super().__init__()
        self.par = par
        up = torch.randn(s.hidden, s.dim, generator=gen) * s.dim ** -0.5
        down = torch.randn(s.dim, s.hidden, generator=gen) * s.hidden ** -0.5
        self.norm = nn.LayerNorm(s.dim)
        self.up = nn.Parameter(up.chunk(par.tp, 0)[par.tp_rank].clone())
        self.down = nn.Parameter(down.chunk(par.tp, 1)[par.tp_rank].clone())
        self.bias = nn.Parameter(torch.zeros(s.dim))

    def forward(self, x):
        h = ToParallel.apply(self.norm(x), self.par.tp_group)
        h = F.linear(F.silu(F.linear(h, self.up)), self.down)
        return x + FromParallel.apply(h, self.par.tp_group) + self.bias


class QuantileNet(nn.Module):
    def __init__(self, s, par, gen):
        super().__init__()
        self.stem = nn.Linear(s.features, s.dim)
        self.body = nn.ModuleList(ParallelMLP(s, par, gen) for _ in range(s.depth))
        self.norm = nn.LayerNorm(s.dim)
        self.out = nn.Linear(s.dim, len(s.quantiles))

    def forward(self, x):
        x = self.stem(x)
        for block in self.body:
            x = block(x)
        return self.out(self.norm(x))


def pinball(pred, target, quantiles):
    q = torch.tensor(quantiles, device=pred.device)
    diff = target[:, None] - pred
    return torch.maximum(q * diff, (q - 1) * diff).mean()


def table(s, n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, s.features, generator=g)
    y = torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.3 * x[:, 3:6].abs().sum(1)
    return x, y + 0.2 * (1 + x[:, 6].abs()) * torch.randn(n, generator=g)


def main():
    s, par = Settings(), Parallel()
    torch.manual_seed(s.seed)
    net = QuantileNet(s, par, torch.Generator().manual_seed(s.seed)).to(par.device)
    for block in net.body:
        fully_shard(block, mesh=par.mesh["dp"])
    fully_shard(net, mesh=par.mesh["dp"])
    opt = torch.optim.AdamW(net.parameters(), lr=s.lr, weight_decay=1e-3)

    for step in range(1, s.steps + 1):
        x, y = (par.rows(t) for t in table(s, s.batch, 600 + step))
        loss = pinball(net(x), y, s.quantiles)
        loss.backward()
        opt.step()
        opt.zero_grad()
        if step % s.log_every == 0:
            shown = par.dp_mean(loss)
            if par.rank == 0:
                print(f"{step:4d}  pinball {shown:.6f}", flush=True)

    net.eval()
    with torch.no_grad():
        x, y = (par.rows(t) for t in table(s, 256, 1))
        pred = net(x)
        held = par.dp_mean(pinball(pred, y, s.quantiles))
        inside = par.dp_mean(((y > pred[:, 0]) & (y < pred[:, -1])).float().mean())
    net.reshard()
    stem = net.stem.weight.full_tensor().norm()
    if par.rank == 0:
        print(f"held-out pinball {held:.6f} coverage {inside:.4f} |stem| {stem.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
