"""Diffusion denoiser: a short phase with gradients, then fine-tuning without backward (MeZO, two-point estimates)."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

SIZE, T = 8, 50


class Denoiser(nn.Module):
    def __init__(self, ch=16):
        super().__init__()
        self.temb = nn.Embedding(T, ch)
        self.inp = nn.Conv2d(1, ch, 3, padding=1)
        self.mid = nn.ModuleList([nn.Sequential(nn.GroupNorm(4, ch), nn.SiLU(), nn.Conv2d(ch, ch, 3, padding=1)) for _ in range(3)])
        self.out = nn.Conv2d(ch, 1, 3, padding=1)

    def forward(self, x, t):
        h = self.inp(x) + self.temb(t)[:, :, None, None]
        for m in self.mid:
            h = h + m(h)
        return self.out(h)


def alpha_bar(t):
    return torch.cos(0.5 * torch.pi * (t.float() + 1) / (T + 1)) ** 2


def clean_images(n, g, shift=0.0):
    """Checker or stripe patterns of random contrast; the fine-tuning domain is brighter."""
    yy, xx = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    period = torch.randint(2, 5, (n,), generator=g)
    checker = torch.rand(n, generator=g) < 0.5
    stripe = ((xx[None] // period[:, None, None]) % 2).float()
    square = (((xx[None] // period[:, None, None]) + (yy[None] // period[:, None, None])) % 2).float()
    x = torch.where(checker[:, None, None], square, stripe) * 2 - 1
    return (x * (0.5 + 0.5 * torch.rand(n, 1, 1, generator=g)))[:, None] + shift


def make_batch(step, phase, batch):
    """The rows of this rank from the batch of a step; everything follows from step and phase."""
    g = torch.Generator().manual_seed(1_000_000 * (phase + 1) + step)
    x = clean_images(batch, g, shift=0.4 * phase)
    t = torch.randint(T, (batch,), generator=g)
    noise = torch.randn(x.shape, generator=g)
    a = alpha_bar(t)[:, None, None, None]
    world, rank = dist.get_world_size(), dist.get_rank()
    return tuple(v.chunk(world)[rank] for v in (a.sqrt() * x + (1 - a).sqrt() * noise, t, noise))


def global_mean(value):
    value = value.detach().double()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


class ZerothOrder:
    """SGD with momentum along random directions.

    A direction is never stored: it is drawn again from its seed, for the whole parameter, and each rank uses its rows.
    """

    def __init__(self, model, lr, eps=1e-2, momentum=0.5):
        self.model, self.lr, self.eps, self.momentum = model, lr, eps, momentum
        self.projected = []     # the last projected gradients and their seeds

    @torch.no_grad()
    def move(self, seed, amount):
        g = torch.Generator().manual_seed(seed)
        for p in self.model.parameters():
            z = torch.randn(p.shape, generator=g)
            if isinstance(p, DTensor):
                world, rank = p.device_mesh.size(), p.device_mesh.get_local_rank()
                parts = z.chunk(world, dim=p.placements[0].dim)
                if rank < len(parts):
                    p.to_local().add_(parts[rank], alpha=amount)
            else:
                p.add_(z, alpha=amount)

    @torch.no_grad()
    def step(self, closure, seed):
        self.move(seed, self.eps)
        plus = closure()
        self.model.reshard()
        self.move(seed, -2 * self.eps)
        minus = closure()
        self.model.reshard()
        self.move(seed, self.eps)
        slope = (plus - minus) / (2 * self.eps)
        self.projected = [(s, c * self.momentum) for s, c in self.projected][-3:] + [(seed, slope)]
        for s, c in self.projected:
            self.move(s, -self.lr * c)
        return (plus + minus) / 2


def warm_steps(model, steps, batch):
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    for step in range(steps):
        x, t, noise = make_batch(step, 0, batch)
        loss = F.mse_loss(model(x, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield step + 1, global_mean(loss)


def tuning_steps(model, zo, first, steps, batch):
    model.requires_grad_(False)
    for step in range(first, steps):
        x, t, noise = make_batch(step, 1, batch)
        yield step + 1, zo.step(lambda: global_mean(F.mse_loss(model(x, t), noise)), seed=50_000 + step)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--warm", type=int, default=10)
    ap.add_argument("--tune", type=int, default=14)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--save-every", type=int, default=0, help="in the tuning phase")
    ap.add_argument("--out", default="mezo")
    ap.add_argument("--resume", action="store_true")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    say = print if dist.get_rank() == 0 else (lambda *a: None)

    torch.manual_seed(6)
    model = Denoiser()
    for m in model.mid:
        fully_shard(m)
    fully_shard(model)
    zo = ZerothOrder(model, lr=2e-4)
    first = 0
    if args.resume:
        folder = os.path.join(args.out, max(os.listdir(args.out), key=lambda d: int(d.rpartition("_")[2])))
        state = {"model": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(model, state["model"])
        extra = torch.load(os.path.join(folder, "zo.pt"))
        first, zo.projected = extra["tuned"], extra["projected"]
    else:
        for step, loss in warm_steps(model, args.warm, args.batch):
            say(f"warm {step} loss {loss:.5f}")

    for step, loss in tuning_steps(model, zo, first, args.tune, args.batch):
        say(f"tune {step} loss {loss:.5f}")
        if args.save_every and step % args.save_every == 0:
            folder = os.path.join(args.out, f"tune_{step}")
            dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
            if dist.get_rank() == 0:
                torch.save({"tuned": step, "projected": zo.projected}, os.path.join(folder, "zo.pt"))
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
