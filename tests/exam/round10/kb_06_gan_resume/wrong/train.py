import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import checkpoint
from nets import Discriminator, Generator

Z = 16


class GAN:
    """Non-saturating GAN with hinge discriminator; both nets sharded, one Adam each."""

    def __init__(self, lr_g=1e-3, lr_d=2e-3, seed=21):
        torch.manual_seed(seed)
        self.gen, self.disc = Generator(Z), Discriminator()
        for net, parts in ((self.gen, (self.gen.up, self.gen.out)), (self.disc, (self.disc.down,))):
            for part in parts:
                fully_shard(part)
            fully_shard(net)
        self.opt_gen = torch.optim.Adam(self.gen.parameters(), lr=lr_g, betas=(0.5, 0.999))
        self.opt_disc = torch.optim.Adam(self.disc.parameters(), lr=lr_d, betas=(0.5, 0.999))
        self.step = 0

    def train_step(self, real, z_d, z_g):
        with torch.no_grad():
            fake = self.gen(z_d)
        # real and fake in one forward, so that the weights are gathered once
        scores = self.disc(torch.cat([real, fake]))
        s_real, s_fake = scores.chunk(2)
        loss_d = F.relu(1 - s_real).mean() + F.relu(1 + s_fake).mean()
        self.opt_disc.zero_grad()
        loss_d.backward()
        self.opt_disc.step()

        loss_g = -self.disc(self.gen(z_g)).mean()
        self.opt_gen.zero_grad()
        loss_g.backward()
        self.opt_gen.step()
        self.opt_disc.zero_grad()
        self.step += 1
        return torch.stack([loss_d.detach(), loss_g.detach()])


def rings(n, g, size=12):
    """Soft rings with random centre and radius, values in [-1, 1]."""
    yy, xx = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    c = torch.rand(n, 2, generator=g) * 0.6 - 0.3
    r = torch.rand(n, generator=g) * 0.3 + 0.35
    d = ((yy - c[:, 0, None, None]) ** 2 + (xx - c[:, 1, None, None]) ** 2).sqrt()
    return (2 * torch.exp(-((d - r[:, None, None]) / 0.15) ** 2) - 1)[:, None]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--ckpt-every", type=int, default=0)
    p.add_argument("--ckpt-root", default="ckpts")
    p.add_argument("--resume-from", default=None)
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    gan = GAN()
    if args.resume_from:
        name = checkpoint.load(gan, args.resume_from)
        if rank == 0:
            print("resumed from", name)

    per_rank = args.batch // world
    mine = slice(rank * per_rank, (rank + 1) * per_rank)
    while gan.step < args.steps:
        g = torch.Generator().manual_seed(90_000 + gan.step)
        real = rings(args.batch, g)[mine]
        z_d, z_g = torch.randn(2, args.batch, Z, generator=g)[:, mine]
        losses = gan.train_step(real, z_d, z_g)
        dist.all_reduce(losses)
        if rank == 0:
            print(f"step {gan.step} D {losses[0] / world:.4f} G {losses[1] / world:.4f}")
        if args.ckpt_every and gan.step % args.ckpt_every == 0:
            checkpoint.save(gan, args.ckpt_root)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
