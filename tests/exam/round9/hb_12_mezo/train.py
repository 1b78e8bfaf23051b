"""Zeroth-order adaptation (SPSA / MeZO) of a pretrained segmentation net to a new domain.

Phase 1 trains by back-propagation, phase 2 uses forward passes only: each probe is a random
direction which is never stored; it is drawn again from its seed whenever it is needed.
"""
import argparse
import os
import zlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Seg(nn.Module):
    def __init__(self, ch=10, classes=3):
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(1, ch, 3, padding=1), nn.ReLU())
        self.b = nn.Sequential(nn.Conv2d(ch, ch, 3, padding=2, dilation=2), nn.ReLU())
        self.out = nn.Conv2d(ch, classes, 1)

    def forward(self, x):
        return self.out(self.b(self.a(x)))


def scenes(n, seed, shift=0.0):
    """Grey images with three intensity classes; the new domain is darker and blurred."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n, 3, 3), generator=g).repeat_interleave(3, 1).repeat_interleave(3, 2)
    x = y[:, None].float() - 1 + 0.3 * torch.randn(n, 1, 9, 9, generator=g)
    if shift:
        x = F.avg_pool2d(x, 3, 1, 1) * (1 - shift) - shift
    return x, y


def noise_like(p, name, seed):
    """The part of a full-size normal draw which belongs to this rank's shard."""
    g = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()) % 1_000_003)
    z = torch.randn(p.shape, generator=g)
    if isinstance(p, DTensor):
        z = distribute_tensor(z, p.device_mesh, p.placements)
    return z


@torch.no_grad()
def move(model, seed, scale):
    for name, p in model.named_parameters():
        p.add_(noise_like(p, name, seed), alpha=scale)


@torch.no_grad()
def global_loss(model, x, y):
    s = F.cross_entropy(model(x), y, reduction="sum")
    n = torch.tensor(float(y.numel()))
    both = torch.stack([s, n])
    dist.all_reduce(both)
    return (both[0] / both[1]).item()


def probe(model, x, y, seed, eps):
    move(model, seed, eps)
    up = global_loss(model, x, y)
    move(model, seed, -2 * eps)
    down = global_loss(model, x, y)
    move(model, seed, eps)
    return (up - down) / (2 * eps), 0.5 * (up + down)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--pre-steps", type=int, default=12)
    ap.add_argument("--zo-steps", type=int, default=14)
    ap.add_argument("--probes", type=int, default=3)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.4)
    ap.add_argument("--zo-lr", type=float, default=0.02)
    ap.add_argument("--eps", type=float, default=2e-2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="mezo")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(40)
    # double precision, since a finite difference loses half of the digits
    model = Seg().double()
    for part in (model.a, model.b, model):
        fully_shard(part, reshard_after_forward=True)

    step, velocity = 0, 0.0  # velocity: running mean of |directional derivative|, which scales the updates
    if args.resume:
        files = sorted(os.listdir(args.resume))
        ck = torch.load(os.path.join(args.resume, files[-1]))
        set_model_state_dict(model, ck["model"], options=FULL)
        step, velocity = ck["step"], ck["velocity"]

    total = args.pre_steps + args.zo_steps
    while step < total:
        x, y = scenes(args.batch, 100 + step, shift=0.0 if step < args.pre_steps else 0.4)
        x, y = x[rank::world].double(), y[rank::world]
        if step < args.pre_steps:
            loss = F.cross_entropy(model(x), y)
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(p.grad, alpha=-args.lr)
            model.zero_grad()
            phase = "backprop"
            value = global_loss(model, x, y)
        else:
            seeds = [7919 * step + k for k in range(args.probes)]
            found = [probe(model, x, y, s, args.eps) for s in seeds]
            size = sum(abs(d) for d, _ in found) / len(found)
            velocity = size if velocity == 0 else 0.8 * velocity + 0.2 * size
            for s, (d, _) in zip(seeds, found):
                move(model, s, -args.zo_lr * d / (velocity + 1e-8) / len(found))
            phase = "forward only"
            value = sum(v for _, v in found) / len(found)
        step += 1
        if step % 4 == 0 and rank == 0:
            print(f"step {step} ({phase}) loss {value:.4f}")
        if args.save_every and step % args.save_every == 0:
            sd = get_model_state_dict(model, options=FULL)
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                torch.save({"model": sd, "step": step, "velocity": velocity}, os.path.join(args.out, f"{step:04d}.pt"))
            dist.barrier()

    if args.export:
        sd = get_model_state_dict(model, options=FULL)
        if rank == 0:
            torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
