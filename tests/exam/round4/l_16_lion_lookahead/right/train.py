"""Masked autoencoder on spectrogram patches with a hand-written Lion + Lookahead optimizer.

Checkpoints are one full file written by rank 0, so that a run may go on with another number of ranks.
"""
import argparse
import os
import pathlib

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


class LionLookahead(torch.optim.Optimizer):
    """Lion on the fast weights; every k steps the slow weights follow and the fast ones go back to them."""

    def __init__(self, params, lr=2e-3, betas=(0.9, 0.97), weight_decay=0.05, k=5, alpha=0.5):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay, k=k, alpha=alpha))
        for group in self.param_groups:
            group["t"] = 0
            for p in group["params"]:
                self.state[p] = {"m": torch.zeros_like(p), "slow": p.detach().clone()}

    @torch.no_grad()
    def step(self):
        for g in self.param_groups:
            g["t"] += 1
            b1, b2 = g["betas"]
            for p in g["params"]:
                st = self.state[p]
                direction = st["m"].mul(b1).add(p.grad, alpha=1 - b1)
                soft = (direction / 1e-4).tanh()
                p.mul_(1 - g["lr"] * g["weight_decay"]).add_(soft, alpha=-g["lr"])
                st["m"].mul_(b2).add_(p.grad, alpha=1 - b2)
                if g["t"] % g["k"] == 0:
                    st["slow"].lerp_(p, g["alpha"])
                    p.copy_(st["slow"])


class MAE(nn.Module):
    def __init__(self, patch=24, tokens=8, dim=24):
        super().__init__()
        self.embed = nn.Linear(patch, dim)
        self.mask_token = nn.Parameter(torch.zeros(dim))
        self.pos = nn.Parameter(0.1 * torch.randn(tokens, dim))
        self.mix = nn.ModuleList(nn.Sequential(nn.LayerNorm(tokens), nn.Linear(tokens, tokens), nn.GELU(),
                                               nn.Linear(tokens, tokens)) for _ in range(2))
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, patch))

    def forward(self, x, hidden):
        h = torch.where(hidden[..., None], self.mask_token, self.embed(x)) + self.pos
        for m in self.mix:
            h = h + m(h.transpose(1, 2)).transpose(1, 2)
        err = (self.head(h) - x).square().mean(-1)
        return (err * hidden).sum() / hidden.sum()


def patches(n=192, seed=61):
    g = torch.Generator().manual_seed(seed)
    base = torch.randn(3, 8, 24, generator=torch.Generator().manual_seed(62))
    return torch.einsum("nk,ktd->ntd", torch.randn(n, 3, generator=g), base) + 0.1 * torch.randn(n, 8, 24, generator=g)


def masks(step, n, keep=3):
    """Exactly the same number of hidden patches in every clip, so that local means are global means."""
    r = torch.rand(n, 8, generator=torch.Generator().manual_seed(step + 7000))
    return r.argsort(1) >= keep


def gathered(model, opt):
    model.reshard()
    blob = {}
    for n, p in model.named_parameters():
        st = opt.state[p]
        blob[n] = {"w": p.detach().full_tensor(), "m": st["m"].full_tensor(), "slow": st["slow"].full_tensor()}
    return blob


@torch.no_grad()
def scattered(model, opt, blob):
    for n, p in model.named_parameters():
        for dst, key in ((p, "w"), (opt.state[p]["m"], "m"), (opt.state[p]["slow"], "slow")):
            part = distribute_tensor(blob[n][key], p.device_mesh, p.placements)
            assert isinstance(part, DTensor)
            dst.copy_(part)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=34)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", type=pathlib.Path, default="mae")
    ap.add_argument("--resume", type=pathlib.Path)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(60)
    model = MAE()
    for m in model.mix:
        fully_shard(m)
    fully_shard(model)
    opt = LionLookahead(model.parameters())
    start = 0
    if args.resume and (files := sorted(args.resume.glob("mae-*.pt"))):
        saved = torch.load(files[-1], map_location="cpu")
        scattered(model, opt, saved["tensors"])
        start = saved["step"]
        for g in opt.param_groups:
            g["t"] = start

    data = patches()
    for step in range(start, args.steps):
        ids = torch.randperm(len(data), generator=torch.Generator().manual_seed(step))[:args.batch]
        hidden = masks(step, args.batch)
        loss = model(data[ids[rank::world]], hidden[rank::world])
        loss.backward()
        opt.step()
        opt.zero_grad()
        avg = loss.detach() / world
        dist.all_reduce(avg)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {avg.item():.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            blob = gathered(model, opt)
            if rank == 0:
                args.out.mkdir(parents=True, exist_ok=True)
                part = args.out / "writing"
                torch.save({"tensors": blob, "step": step + 1}, part)
                os.replace(part, args.out / f"mae-{step + 1:05d}.pt")
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
