#!/usr/bin/env python
"""Adversarial super-resolution of 8x8 glyphs (SRGAN style, hinge loss); both networks are under fully_shard."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

LOW, SIDE, WIDTH, BATCH, ADVERSARIAL = 4, 8, 32, 16, 0.2


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)

    def forward(self, h):
        return h + self.b(torch.nn.functional.silu(self.a(h)))


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(LOW * LOW, WIDTH)
        self.body = nn.Sequential(Residual(WIDTH), Residual(WIDTH))
        self.out = nn.Linear(WIDTH, SIDE * SIDE)

    def forward(self, low):
        return torch.tanh(self.out(self.body(self.inp(low))))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(SIDE * SIDE, WIDTH)
        self.body = nn.Sequential(Residual(WIDTH), Residual(WIDTH))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.out(torch.relu(self.body(self.inp(x))))


def shard(net):
    for block in net.body:
        fully_shard(block)
    return fully_shard(net)


def glyphs(n=128):
    g = torch.Generator().manual_seed(77)
    x = -torch.ones(n, SIDE, SIDE)
    for i in range(n):
        r, c = torch.randint(1, 7, (2,), generator=g).tolist()
        x[i, r, :], x[i, :, c] = 1.0, 1.0
    return (0.9 * x + 0.05 * torch.randn(x.shape, generator=g)).flatten(1)


def degrade(x, noise):
    small = nn.functional.avg_pool2d(x.view(-1, 1, SIDE, SIDE), SIDE // LOW).flatten(1)
    return small + 0.1 * noise


def bundle(g, d, opt_g, opt_d, step):
    gm, go = get_state_dict(g, opt_g)
    dm, do = get_state_dict(d, opt_d)
    return {"g": gm, "opt_g": go, "d": dm, "opt_d": do, "step": step}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(6)
    g, d = shard(Generator()), shard(Discriminator())
    opt_g = torch.optim.Adam(g.parameters(), lr=1e-3, betas=(0.5, 0.9), eps=1e-4)
    opt_d = torch.optim.Adam(d.parameters(), lr=2e-3, betas=(0.5, 0.9), eps=1e-4)
    real_all, step = glyphs(), 0

    if args.resume:
        last = sorted(os.listdir(args.resume))[-1]
        state = bundle(g, d, opt_g, opt_d, 0)
        dcp.load(state, checkpoint_id=os.path.join(args.resume, last))
        set_state_dict(g, opt_g, model_state_dict=state["g"], optim_state_dict=state["opt_g"])
        set_state_dict(d, opt_d, model_state_dict=state["d"], optim_state_dict=state["opt_d"])
        step = state["step"]

    while step < args.steps:
        gen = torch.Generator().manual_seed(300 + step)
        real = real_all[torch.randint(len(real_all), (BATCH,), generator=gen)][rank::world]
        low = degrade(real, torch.randn(BATCH, LOW * LOW, generator=gen)[rank::world])

        # discriminator
        with torch.no_grad():
            fake = g(low)
        d_loss = torch.relu(1 - d(real)).mean() + torch.relu(1 + d(fake)).mean()
        d_loss.backward()
        opt_d.step()
        opt_d.zero_grad()

        # generator
        opt_g.zero_grad()
        sharp = g(low)
        pixel = (sharp - real).abs().mean()
        g_loss = pixel - ADVERSARIAL * d(sharp).mean()
        g_loss.backward()
        opt_g.step()

        step += 1
        if step == 1 or step % 6 == 0:
            both = torch.stack([pixel.detach(), d_loss.detach()]) / world
            dist.all_reduce(both)
            if rank == 0:
                print(f"step {step} loss {both[0].item():.5f} discriminator {both[1].item():.5f}", flush=True)
        if args.out and args.save_every and step % args.save_every == 0:
            dcp.save(bundle(g, d, opt_g, opt_d, step), checkpoint_id=os.path.join(args.out, f"{step:06d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
