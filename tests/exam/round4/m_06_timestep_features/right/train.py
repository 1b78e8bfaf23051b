"""Denoiser conditioned on the diffusion time, bfloat16 compute with float32 master weights."""
import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

T = 1000


def alpha_bar(t):
    return torch.cos(0.5 * math.pi * t.float() / T) ** 2


class TimeFeatures(nn.Module):
    def __init__(self, dim, fastest=1.0):
        super().__init__()
        freqs = fastest * torch.exp(-math.log(2000.0) * torch.arange(dim // 2) / (dim // 2))
        self.register_buffer("freqs", freqs, persistent=False)

    def forward(self, t):
        ang = t[:, None] * self.freqs
        return torch.cat([ang.sin(), ang.cos()], dim=1)


class Denoiser(nn.Module):
    def __init__(self, d=6, width=48, tdim=24):
        super().__init__()
        self.time = TimeFeatures(tdim)
        self.inp = nn.Linear(d + tdim, width)
        self.mid = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.out = nn.Linear(width, d)

    def forward(self, x, t):
        feats = self.time(t).to(x.dtype)
        h = nn.functional.silu(self.inp(torch.cat([x, feats], dim=1)))
        for m in self.mid:
            h = h + nn.functional.silu(m(h))
        return self.out(h)


def build():
    torch.manual_seed(8)
    model = Denoiser()
    inner = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    outer = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    for m in model.mid:
        fully_shard(m, mp_policy=inner)
    return fully_shard(model, mp_policy=outer)


def sample_clean(n, g):
    k = torch.randint(4, (n,), generator=g)
    corners = torch.tensor([[1., 1, -1, 0, 0, 1], [-1, 1, 1, 1, 0, 0], [1, -1, 0, 0, 1, -1], [-1, -1, 0, -1, -1, 0]])
    return corners[k] + 0.1 * torch.randn(n, 6, generator=g)


def noisy_batch(seed, n):
    g = torch.Generator().manual_seed(seed)
    x0 = sample_clean(n, g)
    t = torch.randint(1, T, (n,), generator=g)
    eps = torch.randn(n, 6, generator=g)
    a = alpha_bar(t)[:, None]
    return a.sqrt() * x0 + (1 - a).sqrt() * eps, t, eps


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    model = build()
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=args.lr, total_steps=args.steps)
    for step in range(args.steps):
        xt, t, eps = (z.chunk(world)[rank] for z in noisy_batch(step, args.batch))
        pred = model(xt, t)
        loss = (pred - eps).square().mean()
        loss.backward()
        opt.step()
        sched.step()
        opt.zero_grad()
        m = loss.detach().clone()
        dist.all_reduce(m)
        if rank == 0:
            print(f"step {step + 1} loss {m.item() / world:.4f} lr {sched.get_last_lr()[0]:.2e}", flush=True)

    sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0 and args.export:
        torch.save(sd, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
