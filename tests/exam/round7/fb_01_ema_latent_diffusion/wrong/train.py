"""Latent diffusion with an EMA model for sampling and evaluation."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import checkpoint
from data import diffusion_batch
from ema import ModelEma
from model import LatentDenoiser


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--batch-size", type=int, default=16)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--ema-decay", type=float, default=0.95)
    p.add_argument("--timesteps", type=int, default=100)
    p.add_argument("--seed", type=int, default=3)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="checkpoints")
    p.add_argument("--resume", default=None)
    return p.parse_args()


def build(seed):
    torch.manual_seed(seed)
    model = LatentDenoiser()
    for blk in model.blocks:
        fully_shard(blk)
    return fully_shard(model)


@torch.no_grad()
def latent_stats(z):
    """Per-channel mean and std of the latents over all ranks."""
    n = torch.tensor([float(z.numel() / z.shape[1])])
    sums = torch.cat([z.sum((0, 2, 3)), z.pow(2).sum((0, 2, 3)), n])
    dist.all_reduce(sums)
    c = z.shape[1]
    mean = sums[:c] / sums[-1]
    var = sums[c:2 * c] / sums[-1] - mean**2
    return mean, var.sqrt()


@torch.no_grad()
def evaluate(model, abar, args, rank, world):
    total = torch.zeros(2)
    for i in range(4):
        z, noise, t = diffusion_batch(10_000 + i, args.batch_size, args.timesteps, args.seed, rank, world)
        pred = model(z, noise, abar[t], t)
        total += torch.tensor([F.mse_loss(pred, noise, reduction="sum").item(), noise.numel()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    model = build(args.seed)
    ema = ModelEma(model, build(args.seed), args.ema_decay)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    abar = torch.cumprod(1 - torch.linspace(1e-3, 0.08, args.timesteps), 0)

    start = checkpoint.load(args.resume, model, ema, optimizer, scheduler) if args.resume else 0
    for step in range(start, args.steps):
        z, noise, t = diffusion_batch(step, args.batch_size, args.timesteps, args.seed, rank, world)
        model.update_latent_stats(*latent_stats(z))
        loss = F.mse_loss(model(z, noise, abar[t], t), noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        ema.update()

        loss = loss.detach()
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step + 1:3d} loss {loss.item() / world:.5f}")
        if args.save_every and (step + 1) % args.save_every == 0:
            checkpoint.save(args.out, step + 1, model, ema, optimizer, scheduler)

    raw = evaluate(model, abar, args, rank, world)
    avg = evaluate(ema.module, abar, args, rank, world)
    if rank == 0:
        print(f"eval raw {raw:.5f} ema {avg:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
