"""Small DDPM with FSDP2. Noise and timesteps are drawn for the whole batch from the default generator, which is
seeded alike on all ranks; a rank then works on its own rows."""
import argparse
import json
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_state_dict,
                                                     set_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

T = 100
STEPS = 32
BATCH = 16
VALID_EVERY = 4

betas = torch.linspace(1e-3, 0.08, T)
alpha_bar = torch.cumprod(1 - betas, 0)


def time_embedding(t, dim):
    freq = torch.exp(-math.log(1000) * torch.arange(dim // 2) / (dim // 2))
    arg = t[:, None].float() * freq
    return torch.cat([arg.sin(), arg.cos()], 1)


class ResBlock(nn.Module):
    def __init__(self, ch, emb):
        super().__init__()
        self.n1, self.c1 = nn.GroupNorm(4, ch), nn.Conv2d(ch, ch, 3, padding=1)
        self.e = nn.Linear(emb, ch)
        self.n2, self.c2 = nn.GroupNorm(4, ch), nn.Conv2d(ch, ch, 3, padding=1)

    def forward(self, x, e):
        h = self.c1(F.silu(self.n1(x))) + self.e(e)[:, :, None, None]
        return x + self.c2(F.silu(self.n2(h)))


class Denoiser(nn.Module):
    def __init__(self, ch=24, emb=32):
        super().__init__()
        self.emb = emb
        self.time = nn.Sequential(nn.Linear(emb, emb), nn.SiLU(), nn.Linear(emb, emb))
        self.inp = nn.Conv2d(1, ch, 3, padding=1)
        self.blocks = nn.ModuleList([ResBlock(ch, emb) for _ in range(3)])
        self.out = nn.Conv2d(ch, 1, 3, padding=1)

    def forward(self, x, t):
        e = self.time(time_embedding(t, self.emb))
        h = self.inp(x)
        for b in self.blocks:
            h = b(h, e)
        return self.out(h)


def make_images(n, seed):
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.linspace(-1, 1, 12), torch.linspace(-1, 1, 12), indexing="ij")
    a, b, c = torch.rand(3, n, 1, 1, generator=g) * 4 - 2
    return torch.tanh(2 * torch.sin(a * xx * 3 + b * yy * 3 + c))[:, None]


def noisy(x, t, eps):
    ab = alpha_bar[t][:, None, None, None]
    return ab.sqrt() * x + (1 - ab).sqrt() * eps


@torch.no_grad()
def validate(model, images, rank, world):
    """Loss on fixed timesteps and fixed noise, so that the figures of different steps can be compared."""
    gen = torch.Generator().manual_seed(1234)
    t = torch.randint(0, T, (len(images),), generator=gen)
    eps = torch.randn(images.shape, generator=gen)
    part = torch.arange(len(images)).chunk(world)[rank]
    out = model(noisy(images[part], t[part], eps[part]), t[part])
    total = (out - eps[part]).pow(2).mean((1, 2, 3)).sum()
    dist.all_reduce(total)
    return total.item() / len(images)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="runs")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42)

    model = Denoiser()
    mesh = init_device_mesh("cpu", (world,))
    for b in model.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.99))

    train, valid = make_images(384, 1), make_images(32, 2)
    step = 0
    if args.resume:
        with open(os.path.join(args.resume, "latest.json")) as f:
            folder = os.path.join(args.resume, json.load(f)["folder"])
        m, o = get_state_dict(model, opt)
        state = {"model": m, "optim": o, "step": 0, "rng": torch.get_rng_state()}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        step = state["step"]
        torch.set_rng_state(state["rng"])

    while step < STEPS:
        idx = torch.randint(0, len(train), (BATCH,))
        t = torch.randint(0, T, (BATCH,))
        eps = torch.randn(BATCH, 1, 12, 12)
        mine = torch.arange(BATCH).chunk(world)[rank]
        x = train[idx[mine]]

        pred = model(noisy(x, t[mine], eps[mine]), t[mine])
        loss = F.mse_loss(pred, eps[mine])
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        step += 1

        shown = loss.detach().clone()
        dist.all_reduce(shown)
        line = f"step {step} loss {shown.item() / world:.5f}"
        if step % VALID_EVERY == 0:
            line += f" valid {validate(model, valid, rank, world):.5f}"
        if rank == 0:
            print(line)

        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "optim": o, "step": step, "rng": torch.get_rng_state()},
                     checkpoint_id=os.path.join(args.out, f"ddpm_{step}"))
            if rank == 0:
                with open(os.path.join(args.out, "latest.json"), "w") as f:
                    json.dump({"folder": f"ddpm_{step}"}, f)

    if args.export:
        sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
