"""Contrastive predictive coding of speech with negatives from all ranks, own LAMB optimizer, FSDP2."""
import argparse
import math
import random
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from lamb import LAMB
from losses import info_nce
from model import CPC


def utterances(n, g, samples=192):
    """Chirps with random start and slope."""
    t = torch.arange(samples) / samples
    f0 = 4 + 16 * torch.rand(n, 1, generator=g)
    slope = 12 * torch.randn(n, 1, generator=g)
    phase = 2 * math.pi * torch.rand(n, 1, generator=g)
    return torch.sin(2 * math.pi * (f0 * t + slope * t**2) + phase) + 0.1 * torch.randn(n, samples, generator=g)


def stream(batch, g, rng):
    """Endless global batches; every rank draws the same ones and the frame is common to all."""
    while True:
        yield utterances(batch, g), rng.randint(3, 8)


def save(path, model, opt, g, rng, step, rank):
    path.mkdir(parents=True, exist_ok=True)
    local = {
        "params": [p.to_local() for p in model.parameters()],
        "optim": [{k: v.to_local() if hasattr(v, "to_local") else v for k, v in opt.state[p].items()}
                  for p in model.parameters()],
        "generator": g.get_state(), "frame_rng": rng.getstate(), "step": step,
    }
    torch.save(local, path / f"shard{rank}.pt")
    dist.barrier()


@torch.no_grad()
def load(folder, model, opt, g, rng, rank):
    path = sorted(Path(folder).glob("ckpt*"))[-1]
    local = torch.load(path / f"shard{rank}.pt", weights_only=False)
    for p, saved, state in zip(model.parameters(), local["params"], local["optim"]):
        p.to_local().copy_(saved)
        opt.state[p] = {"step": state["step"]}
        for key in ("exp_avg", "exp_avg_sq"):
            opt.state[p][key] = torch.zeros_like(p)
            opt.state[p][key].to_local().copy_(state[key])
    g.set_state(local["generator"])
    rng.setstate(local["frame_rng"])
    return local["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(13)
    model = CPC()
    fully_shard(model.encoder)
    fully_shard(model)
    opt = LAMB(model.parameters(), lr=2e-2)
    g, rng = torch.Generator().manual_seed(500), random.Random(501)
    start = load(args.resume, model, opt, g, rng, rank) if args.resume else 0

    batches = stream(args.batch, g, rng)
    for step in range(start + 1, args.steps + 1):
        wave, at = next(batches)
        pairs = model(wave.chunk(world)[rank], at)
        loss = sum(info_nce(c, z) for c, z in pairs) / len(pairs)
        opt.zero_grad()
        loss.backward()
        opt.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 3 == 0:
            print(f"step {step} nce {shown.item() / world:.4f} (chance {math.log(args.batch):.2f})", flush=True)
        if args.save_every and step % args.save_every == 0:
            save(Path(args.out) / f"ckpt{step:05d}", model, opt, g, rng, step, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
