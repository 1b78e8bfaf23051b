"""Diffusion on a spiral of points with FSDP2; the exported model is the moving average."""
import argparse

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from checkpoint import Checkpointer
from denoiser import Denoiser, NoiseSchedule


class Ema:
    def __init__(self, model, decay=0.9):
        self.decay = decay
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for n, p in model.named_parameters():
            self.shadow[n].lerp_(p, 1 - self.decay)


def spiral(n, g):
    r = torch.rand(n, generator=g)
    a = 9.0 * r
    return torch.stack([r * a.cos(), r * a.sin()], 1) * 1.5 + 0.03 * torch.randn(n, 2, generator=g)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Denoiser()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.9, 0.99))
    ema = Ema(model)
    ckpt = Checkpointer(model, optimizer, ema)
    schedule = NoiseSchedule()
    start = ckpt.load(args.resume) if args.resume else 0

    per_rank = args.batch // world
    for step in range(start, args.steps):
        # the whole global batch is drawn from the step's own generator, then cut
        g = torch.Generator().manual_seed(10_000 + step)
        x = spiral(args.batch, g)
        t = torch.randint(schedule.steps, (args.batch,), generator=g)
        noise = torch.randn(args.batch, 2, generator=g)
        cut = slice(rank * per_rank, (rank + 1) * per_rank)
        x, t, noise = x[cut], t[cut], noise[cut]
        loss = (model(schedule.add_noise(x, t, noise), t / schedule.steps) - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and (step + 1) % 5 == 0:
            print(f"step {step + 1} loss {shown.item() / world:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            ckpt.save(args.out, step + 1)

    if args.export:
        full = {n: s.full_tensor() if hasattr(s, "full_tensor") else s for n, s in ema.shadow.items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
