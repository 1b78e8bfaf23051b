import argparse
import math
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from denoiser import Denoiser
from fused import InBackward


def moons(n, gen):
    a = math.pi * torch.rand(n, generator=gen)
    lower = torch.rand(n, generator=gen) < 0.5
    x = torch.where(lower, 1 - a.cos(), a.cos())
    y = torch.where(lower, 0.5 - a.sin(), a.sin())
    return torch.stack([x - 0.5, y - 0.25], 1) + 0.05 * torch.randn(n, 2, generator=gen)


@torch.no_grad()
def sample(model, n, steps, rank, world):
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(555)).chunk(world)[rank]
    for k in range(steps):
        t = torch.full((len(x),), k / steps)
        x = x + model(x, t) / steps
    parts = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


class Average:
    """Moving average of the sharded weights, kept beside the model."""

    def __init__(self, model, decay):
        self.decay = decay
        self.weights = {n: p.detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model, step):
        d = min(self.decay, (1 + step) / (10 + step))
        for n, p in model.named_parameters():
            self.weights[n].lerp_(p.detach(), 1 - d)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--lr", type=float, default=6e-3)
    ap.add_argument("--warmup", type=int, default=5)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(40)
    model = Denoiser()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    optim = InBackward(model, args.lr, max_rms=0.05)
    average = Average(model, 0.95)
    gen = torch.Generator().manual_seed(41)
    step = 0

    def state():
        return {"model": get_model_state_dict(model), "optim": optim.state_dict(), "average": average.weights, "gen": gen.get_state(), "step": step}

    if args.resume:
        sd = state()
        dcp.load(sd, checkpoint_id=sorted(Path(args.resume).glob("[0-9]*"))[-1])
        set_model_state_dict(model, sd["model"])
        optim.load_state_dict(sd["optim"])
        average.weights = sd["average"]
        gen.set_state(sd["gen"])
        step = sd["step"]

    while step < args.steps:
        # the whole batch is drawn everywhere, so that data, noise and times do not depend on the number of ranks
        data = moons(args.batch, gen)
        noise = torch.randn(args.batch, 2, generator=gen)
        t = torch.sigmoid(torch.randn(args.batch, generator=gen))
        data, noise, t = (v.chunk(world)[rank] for v in (data, noise, t))
        optim.factor = min(1.0, (step + 1) / args.warmup)
        velocity = model(torch.lerp(noise, data, t[:, None]), t)
        loss = (velocity - (data - noise)).square().mean()
        loss.backward()
        average.update(model, step)
        step += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0 and step % 6 == 0:
            print(f"step {step} loss {mean.item() / world:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0 and step < args.steps:
            dcp.save(state(), checkpoint_id=Path(args.out) / f"{step:06d}")

    set_model_state_dict(model, average.weights)
    points = sample(model, 256, 12, rank, world)
    if rank == 0:
        real = moons(256, torch.Generator().manual_seed(42))
        print(f"mean distance of a sample to the nearest real point {torch.cdist(points, real).amin(1).mean().item():.4f}", flush=True)
    if args.export:
        full = {k: v.full_tensor() for k, v in get_model_state_dict(model).items()}
        if rank == 0:
            torch.save({"average": full, "samples": points}, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
