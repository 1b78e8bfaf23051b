"""Non-saturating GAN on a ring of Gaussians rendered through a random projection; FSDP2 for both nets.

Each update works on `accum` micro-batches. The discriminator's gradients of the generator's
pass are of no use, so they are dropped before the next discriminator update.
"""
import argparse
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


@dataclass
class Config:
    steps: int = 18
    micro: int = 32
    accum: int = 2
    zdim: int = 8
    xdim: int = 16
    width: int = 32
    lr: float = 2e-3
    seed: int = 21


def mlp(i, h, o):
    return nn.Sequential(nn.Linear(i, h), nn.LeakyReLU(0.2), nn.Linear(h, h), nn.LeakyReLU(0.2), nn.Linear(h, o))


class Ring:
    def __init__(self, cfg, rank, world):
        self.cfg, self.rank, self.world = cfg, rank, world
        self.gen = torch.Generator().manual_seed(cfg.seed)
        self.project = torch.randn(2, cfg.xdim, generator=torch.Generator().manual_seed(1))

    def mine(self, t):
        n = t.shape[0] // self.world
        return t[self.rank * n:(self.rank + 1) * n]

    def real(self):
        k = torch.randint(0, 8, (self.cfg.micro,), generator=self.gen) * (torch.pi / 4)
        xy = torch.stack([k.cos(), k.sin()], dim=1) + 0.05 * torch.randn(self.cfg.micro, 2, generator=self.gen)
        return self.mine(xy @ self.project)

    def noise(self):
        return self.mine(torch.randn(self.cfg.micro, self.cfg.zdim, generator=self.gen))


def shard(net):
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(net)


def d_update(G, D, opt, data, cfg):
    opt.zero_grad()
    total = 0.0
    for i in range(cfg.accum):
        D.set_requires_gradient_sync(i == cfg.accum - 1)
        with torch.no_grad():
            fake = G(data.noise())
        logits = D(torch.cat([data.real(), fake]))
        real, fake = logits.chunk(2)
        loss = (F.softplus(-real).mean() + F.softplus(fake).mean()) / cfg.accum
        loss.backward()
        total += loss.item()
    opt.step()
    return total


def g_update(G, D, opt, data, cfg):
    opt.zero_grad()
    D.requires_grad_(False)
    total = 0.0
    for i in range(cfg.accum):
        G.set_requires_gradient_sync(i == cfg.accum - 1)
        loss = F.softplus(-D(G(data.noise()))).mean() / cfg.accum
        loss.backward()
        total += loss.item()
    opt.step()
    D.requires_grad_(True)
    return total


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()
    cfg = Config()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(cfg.seed)
    G, D = shard(mlp(cfg.zdim, cfg.width, cfg.xdim)), shard(mlp(cfg.xdim, cfg.width, 1))
    opt_g = torch.optim.Adam(G.parameters(), lr=cfg.lr, betas=(0.5, 0.99))
    opt_d = torch.optim.Adam(D.parameters(), lr=cfg.lr, betas=(0.5, 0.99))
    data = Ring(cfg, rank, world)

    def snapshot(step):
        g, go = get_state_dict(G, opt_g)
        d, do = get_state_dict(D, opt_d)
        return {"g": g, "go": go, "d": d, "do": do, "rng": data.gen.get_state(), "step": torch.tensor(step)}

    start = 0
    if args.resume:
        last = max(os.listdir(args.resume), key=int)
        state = snapshot(0)
        dcp.load(state, checkpoint_id=os.path.join(args.resume, last))
        set_state_dict(G, opt_g, model_state_dict=state["g"], optim_state_dict=state["go"])
        set_state_dict(D, opt_d, model_state_dict=state["d"], optim_state_dict=state["do"])
        data.gen.set_state(state["rng"])
        start = int(state["step"])

    for step in range(start + 1, cfg.steps + 1):
        loss_d = d_update(G, D, opt_d, data, cfg)
        loss_g = g_update(G, D, opt_g, data, cfg)
        if rank == 0 and step % 3 == 0:
            print(f"step {step:3d}  D {loss_d:.4f}  G {loss_g:.4f}", flush=True)
        if args.out and args.save_every and step % args.save_every == 0:
            dcp.save(snapshot(step), checkpoint_id=os.path.join(args.out, str(step)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
