"""Hinge GAN on a ring of Gaussians: two sharded networks, n critic steps per generator step, averaged generator for sampling."""
import argparse
import copy
import glob
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from networks import Critic, Generator, shard_critic, shard_generator

LATENT, BATCH, ROUNDS, CRITIC_STEPS = 4, 128, 16, 2


class Noise:
    """One stream of random numbers for the whole job; a rank takes its rows of every draw."""

    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def latent(self):
        return torch.randn(BATCH, LATENT, generator=self.gen).chunk(self.world)[self.rank]

    def real(self):
        k = torch.randint(8, (BATCH,), generator=self.gen) * (torch.pi / 4)
        x = torch.stack([k.cos(), k.sin()], dim=1) + 0.05 * torch.randn(BATCH, 2, generator=self.gen)
        return x.chunk(self.world)[self.rank]


@torch.no_grad()
def update_average(average, model, decay):
    # both are sharded in the same way, so the average is taken shard by shard
    for a, p in zip(average.parameters(), model.parameters(), strict=True):
        a.lerp_(p, 1 - decay)


class GAN:
    def __init__(self):
        torch.manual_seed(0)
        g, d = Generator(LATENT, 48, 2), Critic(2, 48)
        average = copy.deepcopy(g).requires_grad_(False)
        self.g, self.d, self.average = shard_generator(g), shard_critic(d), shard_generator(average)
        self.opt_g = torch.optim.Adam(self.g.parameters(), lr=2e-3, betas=(0.5, 0.9), eps=1e-5)
        self.opt_d = torch.optim.Adam(self.d.parameters(), lr=4e-3, betas=(0.5, 0.9), eps=1e-5)
        self.noise = Noise(seed=17)
        self.round = 0

    def critic_step(self):
        with torch.no_grad():
            fake = self.g(self.noise.latent())
        # one forward over both halves
        score_real, score_fake = self.d(torch.cat([self.noise.real(), fake])).chunk(2)
        loss = (1 - score_real).relu().mean() + (1 + score_fake).relu().mean()
        self.opt_d.zero_grad()
        loss.backward()
        self.opt_d.step()
        return loss.detach()

    def generator_step(self):
        self.d.requires_grad_(False)
        loss = -self.d(self.g(self.noise.latent())).mean()
        self.opt_g.zero_grad()
        loss.backward()
        self.opt_g.step()
        self.d.requires_grad_(True)
        update_average(self.average, self.g, decay=0.9)
        return loss.detach()

    def run_round(self):
        for _ in range(CRITIC_STEPS):
            d_loss = self.critic_step()
        g_loss = self.generator_step()
        self.round += 1
        losses = torch.stack([d_loss, g_loss])
        dist.all_reduce(losses)
        return (losses / dist.get_world_size()).tolist()

    def state(self):
        return {
            "g": get_model_state_dict(self.g),
            "d": get_model_state_dict(self.d),
            "average": get_model_state_dict(self.average),
            "opt_g": get_optimizer_state_dict(self.g, self.opt_g),
            "opt_d": get_optimizer_state_dict(self.d, self.opt_d),
            "noise": self.noise.gen.get_state(),
            "round": self.round,
        }

    def load(self, path):
        state = self.state()
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(self.g, state["g"])
        set_model_state_dict(self.d, state["d"])
        set_model_state_dict(self.average, state["average"])
        set_optimizer_state_dict(self.g, self.opt_g, state["opt_g"])
        set_optimizer_state_dict(self.d, self.opt_d, state["opt_d"])
        self.noise.gen.set_state(state["noise"])
        self.round = state["round"]

    @torch.no_grad()
    def sample_quality(self):
        z = torch.randn(512, LATENT, generator=torch.Generator().manual_seed(5))
        return (self.average(z).norm(dim=1) - 1).abs().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--out", default="gan_ckpt")
    parser.add_argument("--resume")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    gan = GAN()
    if args.resume:
        gan.load(max(glob.glob(os.path.join(args.resume, "round_*"))))
    while gan.round < ROUNDS:
        d_loss, g_loss = gan.run_round()
        if dist.get_rank() == 0 and gan.round % 4 == 0:
            print(f"round {gan.round} critic {d_loss:.5f} generator {g_loss:.5f}", flush=True)
        if args.save_every and gan.round % args.save_every == 0:
            dcp.save(gan.state(), checkpoint_id=os.path.join(args.out, f"round_{gan.round:04d}"))
    quality = gan.sample_quality()
    if dist.get_rank() == 0:
        print(f"mean distance of samples from the ring {quality:.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
