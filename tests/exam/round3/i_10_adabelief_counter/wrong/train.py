"""Auto-encoder trained with a home-made AdaBelief; checkpoints through DCP."""

import argparse
import math
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class AdaBelief(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.t = 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.t += 1
        t = self.t
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                if not st:
                    st["mean"] = torch.zeros_like(p)
                    st["spread"] = torch.zeros_like(p)
                st["mean"].lerp_(p.grad, 1 - b1)
                surprise = p.grad - st["mean"]
                st["spread"].mul_(b2).addcmul_(surprise, surprise, value=1 - b2)
                size = group["lr"] / (1 - b1**t)
                denom = (st["spread"] / (1 - b2**t)).sqrt().add_(group["eps"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.addcdiv_(st["mean"], denom, value=-size)
        return loss


class AutoEncoder(nn.Module):
    def __init__(self, dim=32, code=4):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(dim, 24), nn.GELU(), nn.Linear(24, code))
        self.dec = nn.Sequential(nn.Linear(code, 24), nn.GELU(), nn.Linear(24, dim))

    def forward(self, x):
        return self.dec(self.enc(x))


class Curves:
    """Random smooth curves with four degrees of freedom."""

    def __init__(self, batch, rank, world, dim=32):
        t = torch.linspace(0, 1, dim)
        self.basis = torch.stack([torch.sin(2 * math.pi * t), torch.cos(2 * math.pi * t), t, t * t])
        self.batch, self.rank, self.world = batch, rank, world

    def __getitem__(self, step):
        g = torch.Generator().manual_seed(9_000 + step)
        return (torch.randn(self.batch, 4, generator=g) @ self.basis)[self.rank :: self.world]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", type=pathlib.Path)
    ap.add_argument("--resume", type=pathlib.Path)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(20)
    model = AutoEncoder()
    fully_shard(model.enc, mesh=mesh)
    fully_shard(model.dec, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = AdaBelief(model.parameters(), lr=args.lr, weight_decay=1e-2)

    step = 0
    if args.resume:
        msd, osd = get_state_dict(model, optim)
        state = {"model": msd, "optim": osd, "step": step}
        dcp.load(state, checkpoint_id=max(args.resume.glob("s????")))
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        step = state["step"]

    curves = Curves(64, rank, world)
    while step < args.steps:
        x = curves[step]

        def closure():
            optim.zero_grad()
            loss = F.mse_loss(model(x), x)
            loss.backward()
            return loss

        loss = optim.step(closure).detach()
        step += 1
        dist.all_reduce(loss)
        if rank == 0 and step % 4 == 0:
            print(f"step {step:3d}: reconstruction {loss.item() / world:.5f}", flush=True)
        if args.out and args.save_every and step % args.save_every == 0:
            msd, osd = get_state_dict(model, optim)
            dcp.save({"model": msd, "optim": osd, "step": step}, checkpoint_id=args.out / f"s{step:04d}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
