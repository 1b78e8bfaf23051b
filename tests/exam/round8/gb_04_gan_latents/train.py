"""A small GAN on a two-dimensional mixture, generator and critic both sharded."""
import argparse
import math
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
    steps: int = 30
    batch: int = 32
    latent: int = 8
    hidden: int = 48
    lr: float = 2e-3
    seed: int = 21


def mlp(n_in, hidden, n_out, act):
    return nn.Sequential(nn.Linear(n_in, hidden), act(), nn.Linear(hidden, hidden), act(), nn.Linear(hidden, n_out))


def shard(net):
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(net)


def real_samples(n, g):
    k = torch.randint(6, (n,), generator=g).float() * (math.pi / 3)
    centers = torch.stack([k.cos(), k.sin()], dim=1)
    return 2 * centers + 0.1 * torch.randn(n, 2, generator=g)


class LatentSampler:
    """Draws latents for the global batch and hands out this rank's part."""

    def __init__(self, cfg, rank, world):
        self.cfg, self.rank, self.world = cfg, rank, world
        self.g = torch.Generator().manual_seed(cfg.seed + 1)

    def __call__(self):
        z = torch.randn(self.cfg.batch, self.cfg.latent, generator=self.g)
        return z.chunk(self.world)[self.rank]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="gan_ckpt")
    ap.add_argument("--resume")
    args = ap.parse_args()
    cfg = Config()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg.seed)
    gen = shard(mlp(cfg.latent, cfg.hidden, 2, nn.ReLU))
    critic = shard(mlp(2, cfg.hidden, 1, nn.SiLU))
    g_opt = torch.optim.Adam(gen.parameters(), lr=cfg.lr, betas=(0.5, 0.99))
    d_opt = torch.optim.Adam(critic.parameters(), lr=cfg.lr, betas=(0.5, 0.99))
    latents = LatentSampler(cfg, rank, world)
    data_g = torch.Generator().manual_seed(cfg.seed + 2)

    def pack():
        gm, go = get_state_dict(gen, g_opt)
        dm, do = get_state_dict(critic, d_opt)
        return {"gen": gm, "g_opt": go, "critic": dm, "d_opt": do, "step": 0,
                "latent_rng": latents.g.get_state(), "data_rng": data_g.get_state()}

    step = 0
    if args.resume:
        last = max((d for d in os.listdir(args.resume) if d.isdigit()), key=int)
        state = pack()
        dcp.load(state, checkpoint_id=os.path.join(args.resume, last))
        set_state_dict(gen, g_opt, model_state_dict=state["gen"], optim_state_dict=state["g_opt"])
        set_state_dict(critic, d_opt, model_state_dict=state["critic"], optim_state_dict=state["d_opt"])
        latents.g.set_state(state["latent_rng"])
        data_g.set_state(state["data_rng"])
        step = state["step"]

    while step < cfg.steps:
        real = real_samples(cfg.batch, data_g).chunk(world)[rank]

        with torch.no_grad():
            fake = gen(latents())
        both = critic(torch.cat([real, fake]))
        d_real, d_fake = both.chunk(2)
        d_loss = F.softplus(-d_real).mean() + F.softplus(d_fake).mean()
        d_loss.backward()
        d_opt.step()
        d_opt.zero_grad()

        g_loss = F.softplus(-critic(gen(latents()))).mean()
        g_loss.backward()
        g_opt.step()
        g_opt.zero_grad()
        d_opt.zero_grad()

        step += 1
        stats = torch.stack([d_loss.detach(), g_loss.detach()])
        dist.all_reduce(stats)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} d {stats[0] / world:.5f} g {stats[1] / world:.5f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save({**pack(), "step": step}, checkpoint_id=os.path.join(args.out, str(step)))

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
