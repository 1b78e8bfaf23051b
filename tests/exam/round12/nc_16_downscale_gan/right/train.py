"""Statistical downscaling of rain with a conditional adversarial net: two critic steps for every generator step."""
import argparse
import glob
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import softplus

import archive
from nets import NOISE, Critic, Generator
from rain import BackwardReader

ROUNDS, CRITIC_STEPS = 20, 2


def shard(model, mesh):
    fully_shard(model.net, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Duel:
    def __init__(self, rank, world):
        mesh = init_device_mesh("cpu", (world,))
        torch.manual_seed(44)
        self.gen, self.critic = shard(Generator(), mesh), shard(Critic(), mesh)
        self.gen_opt = torch.optim.RMSprop(self.gen.parameters(), lr=2e-3, eps=1e-6)
        self.critic_opt = torch.optim.RMSprop(self.critic.parameters(), lr=5e-4, eps=1e-6)
        self.read = BackwardReader(rank, world)

    def parts(self):
        return {"gen": (self.gen, self.gen_opt), "critic": (self.critic, self.critic_opt)}

    def critic_step(self, draw):
        coarse, fine = self.read(draw)
        with torch.no_grad():
            fake = self.gen(coarse, self.read.noise(draw, NOISE))
        score = self.critic(torch.cat([coarse, coarse]), torch.cat([fine, fake]))
        real, made = score.chunk(2)
        loss = softplus(-real).mean() + softplus(made).mean()
        loss.backward()
        self.critic_opt.step()
        self.critic_opt.zero_grad()

    def generator_step(self, draw):
        coarse, fine = self.read(draw)
        self.critic.requires_grad_(False)
        made = self.gen(coarse, self.read.noise(draw, NOISE))
        content = (made - fine).abs().mean()
        (content - 0.01 * self.critic(coarse, made).mean()).backward()
        self.gen_opt.step()
        self.gen_opt.zero_grad()
        self.critic.requires_grad_(True)
        return content.detach()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--archive", help="folder of the .npz files")
    ap.add_argument("--every", type=int, default=6)
    ap.add_argument("--resume", help="folder, the newest file is taken")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    duel = Duel(rank, world)
    done = archive.read(max(glob.glob(os.path.join(a.resume, "*.npz"))), **duel.parts()) if a.resume else 0
    while done < ROUNDS:
        draw = done * (CRITIC_STEPS + 1)
        for k in range(CRITIC_STEPS):
            duel.critic_step(draw + k)
        content = duel.generator_step(draw + CRITIC_STEPS) / world
        dist.all_reduce(content)
        done += 1
        if rank == 0 and done % 3 == 0:
            print(f"round {done} loss {content.item():.5f}", flush=True)
        if a.archive and done % a.every == 0:
            archive.write(os.path.join(a.archive, f"{done:04d}.npz"), done, **duel.parts())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
