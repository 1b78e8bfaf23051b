"""VICReg whose variance and covariance terms use the moments of the global batch."""

import argparse
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


class SumOverRanks(torch.autograd.Function):
    """y = sum of x over the ranks. Every rank's loss depends on y, so the backward pass sums too."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g)
        return g


def regularisers(z, n):
    """All ranks compute the same value from summed first and second moments."""
    d = z.shape[1]
    packed = SumOverRanks.apply(torch.cat([z.sum(0, keepdim=True), z.t() @ z]))
    mean, second = packed[0] / n, packed[1:]
    cov = (second - n * torch.outer(mean, mean)) / (n - 1)
    var = F.relu(1 - (cov.diagonal() + 1e-4).sqrt()).mean()
    off = (cov - torch.diag(cov.diagonal())).square().sum() / d
    return var, off


class Net(nn.Module):
    def __init__(self, d_in=32, d=32, out=12):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(d_in, d), nn.LayerNorm(d), nn.GELU())
        self.expand = nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.Linear(d, out, bias=False))

    def forward(self, x):
        return self.expand(self.trunk(x))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    a = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Net()
    fully_shard(model.trunk)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def state(step):
        m, o = get_state_dict(model, opt)
        return {"model": m, "opt": o, "step": step}

    start = 0
    if a.resume:
        st = state(0)
        dcp.load(st, checkpoint_id=os.path.join(a.resume, max(os.listdir(a.resume))))
        set_state_dict(model, opt, model_state_dict=st["model"], optim_state_dict=st["opt"])
        start = st["step"]
    g0 = torch.Generator().manual_seed(5)
    data = torch.randn(512, 6, generator=g0) @ torch.randn(6, 32, generator=g0)
    for step in range(start, a.steps):
        g = torch.Generator().manual_seed(step)
        x = data[torch.randint(0, 512, (a.batch,), generator=g)]
        views = [(x + 0.5 * torch.randn(x.shape, generator=g)).chunk(world)[rank] for _ in range(2)]
        za, zb = model(torch.cat(views)).chunk(2)
        inv = F.mse_loss(za, zb)
        (va, ca), (vb, cb) = regularisers(za, a.batch), regularisers(zb, a.batch)
        loss = 25 * inv + 25 * (va + vb) + (ca + cb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        log = loss.detach() / world
        dist.all_reduce(log)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {log.item():.5f} var {va.item():.4f} cov {ca.item():.4f}", flush=True)
        if a.save_every and (step + 1) % a.save_every == 0:
            dcp.save(state(step + 1), checkpoint_id=os.path.join(a.out, f"{step + 1:05d}"))
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0 and a.export:
        torch.save(full, a.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
