"""Conditional GAN on little spectral envelopes; generator and discriminator are both FSDP2 models."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

BANDS, CLASSES, NOISE = 16, 3, 6


class Res(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.a, self.b = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        return x + self.b(F.silu(self.a(x)))


def trunk(cin, d, cout):
    return nn.Sequential(nn.Linear(cin, d), nn.SiLU(), Res(d), Res(d), nn.Linear(d, cout))


class Generator(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.label = nn.Embedding(CLASSES, NOISE)
        self.net = trunk(2 * NOISE, d, BANDS)

    def forward(self, z, y):
        return self.net(torch.cat([z, self.label(y)], -1))


class Discriminator(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.label = nn.Embedding(CLASSES, BANDS)
        self.net = trunk(2 * BANDS, d, 1)

    def forward(self, x, y):
        return self.net(torch.cat([x, self.label(y)], -1)).squeeze(-1)


def envelopes(y, g):
    f = torch.linspace(0, 1, BANDS)
    centre = 0.2 + 0.3 * y[:, None] + 0.04 * torch.randn(len(y), 1, generator=g)
    return 2 * torch.exp(-((f - centre) ** 2) / 0.02) - 0.5 + 0.05 * torch.randn(len(y), BANDS, generator=g)


def draws(step, batch, rank, world):
    g = torch.Generator().manual_seed(1000 + step)
    y = torch.randint(CLASSES, (batch,), generator=g)
    x = envelopes(y, g)
    z1, z2 = torch.randn(2, batch, NOISE, generator=g)
    return [t.chunk(world)[rank] for t in (x, y, z1, z2)]


def wrap(m):
    for child in m.net:
        if isinstance(child, Res):
            fully_shard(child)
    return fully_shard(m)


def state_of(models, opts):
    s = {}
    for k, m in models.items():
        s[k] = get_model_state_dict(m)
        s[k + "_opt"] = get_optimizer_state_dict(m, opts[k])
    return s


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    models = {"g": wrap(Generator()), "d": wrap(Discriminator())}
    gen, disc = models["g"], models["d"]
    opts = {k: torch.optim.Adam(m.parameters(), lr=1e-3, betas=(0.5, 0.99), eps=1e-4) for k, m in models.items()}
    first = 0
    if a.resume:
        first = max(int(n.split("_")[1]) for n in os.listdir(a.resume))
        s = state_of(models, opts)
        dcp.load(s, checkpoint_id=os.path.join(a.resume, f"gan_{first}"))
        for k, m in models.items():
            set_model_state_dict(m, s[k])
            set_optimizer_state_dict(m, opts[k], s[k + "_opt"])

    for step in range(first, a.steps):
        x, y, z1, z2 = draws(step, a.batch, rank, world)

        with torch.no_grad():
            fake = gen(z1, y)
        d_loss = F.relu(1 - disc(x, y)).mean() + F.relu(1 + disc(fake, y)).mean()
        d_loss.backward()
        opts["d"].step()
        opts["d"].zero_grad()
        opts["g"].zero_grad()
        fake = gen(z2, y)
        g_loss = -disc(fake, y).mean()
        g_loss.backward()
        opts["g"].step()

        if step % 5 == 4:
            gap = torch.stack([fake.detach().mean(0), x.mean(0)]) / world
            dist.all_reduce(gap)
            if rank == 0:
                print(f"{step + 1:3d} d {d_loss.item():.3f} g {g_loss.item():.3f} mean gap {(gap[0] - gap[1]).norm().item():.3f}", flush=True)
        if a.save_every and (step + 1) % a.save_every == 0:
            dcp.save(state_of(models, opts), checkpoint_id=os.path.join(a.out, f"gan_{step + 1}"))

    if a.export:
        o = StateDictOptions(full_state_dict=True, cpu_offload=True)
        full = {k: get_model_state_dict(m, options=o) for k, m in models.items()}
        if rank == 0:
            torch.save(full, a.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
