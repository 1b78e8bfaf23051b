"""Conditional GAN on 3-D point clouds of four helices: two critic updates per generator update, averaged generator."""
import argparse
import math
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from nets import Critic, Generator

LATENT, CLASSES = 8, 4


class Draws:
    """All random numbers of a run: drawn for the global batch on every rank, each rank keeps its part."""

    def __init__(self, seed, batch):
        self.g = torch.Generator().manual_seed(seed)
        self.batch = batch
        n = batch // dist.get_world_size()
        self.mine = slice(dist.get_rank() * n, (dist.get_rank() + 1) * n)

    def normal(self, width):
        return torch.randn(self.batch, width, generator=self.g)[self.mine]

    def uniform(self):
        return torch.rand(self.batch, generator=self.g)[self.mine]

    def classes(self):
        return torch.randint(CLASSES, (self.batch,), generator=self.g)[self.mine]

    def real(self):
        c, t = self.classes(), 4 * math.pi * self.uniform()
        radius, turn = 0.5 + 0.25 * c, 0.5 * math.pi * c
        x = torch.stack([radius * torch.cos(t + turn), radius * torch.sin(t + turn), t / (2 * math.pi) - 1], 1)
        return x + 0.03 * self.normal(3), c


class AveragedShards:
    def __init__(self, module, decay):
        self.module, self.decay = module, decay
        self.average = {n: p.detach().clone() for n, p in module.named_parameters()}

    @torch.no_grad()
    def update(self):
        for n, p in self.module.named_parameters():
            self.average[n].mul_(self.decay).add_(p, alpha=1 - self.decay)

    @torch.no_grad()
    def swap(self):
        for n, p in self.module.named_parameters():
            kept = p.detach().clone()
            p.copy_(self.average[n])
            self.average[n].copy_(kept)


class GanTrainer:
    def __init__(self, args):
        self.args = args
        torch.manual_seed(19)
        self.gen, self.critic = Generator(LATENT, CLASSES), Critic(CLASSES)
        for net in (self.gen, self.critic):
            fully_shard(net.layers)
            fully_shard(net, reshard_after_forward=True)
        self.opt_g = torch.optim.Adam(self.gen.parameters(), lr=args.lr, betas=(0.0, 0.9), eps=1e-5)
        self.opt_c = torch.optim.RMSprop(self.critic.parameters(), lr=args.lr, eps=1e-4)
        self.average = AveragedShards(self.gen, 0.9)
        self.draws = Draws(90, args.batch)
        self.round = 0

    def critic_update(self):
        real, c_real = self.draws.real()
        z, c_fake = self.draws.normal(LATENT), self.draws.classes()
        with torch.no_grad():
            fake = self.gen(z, c_fake)
        blur = 0.3 * max(0.0, 1 - self.round / self.args.rounds)
        both = torch.cat([real + blur * self.draws.normal(3), fake + blur * self.draws.normal(3)])
        on_real, on_fake = self.critic(both, torch.cat([c_real, c_fake])).chunk(2)
        loss = F.relu(1 - on_real).mean() + F.relu(1 + on_fake).mean() + 0.01 * (on_real.square().mean())
        self.critic.zero_grad()
        loss.backward()
        self.opt_c.step()
        return loss.detach()

    def generator_update(self):
        c = self.draws.classes()
        loss = -self.critic(self.gen(self.draws.normal(LATENT), c), c).mean()
        self.gen.zero_grad()
        loss.backward()
        self.opt_g.step()
        self.average.update()
        return loss.detach()

    def train_round(self):
        critic = torch.stack([self.critic_update() for _ in range(2)]).mean()
        losses = torch.stack([critic, self.generator_update()]) / dist.get_world_size()
        dist.all_reduce(losses)
        self.round += 1
        return losses.tolist()

    def state(self):
        gen, opt_g = get_state_dict(self.gen, self.opt_g)
        critic, opt_c = get_state_dict(self.critic, self.opt_c)
        return {"gen": gen, "opt_g": opt_g, "critic": critic, "opt_c": opt_c, "average": self.average.average,
                "draws": self.draws.g.get_state(), "round": self.round}

    def save(self, folder):
        dcp.save(self.state(), checkpoint_id=Path(folder) / f"round{self.round}")

    def load(self, folder):
        newest = max(Path(folder).iterdir(), key=lambda p: int(p.name.removeprefix("round")))
        state = self.state()
        dcp.load(state, checkpoint_id=newest)
        set_state_dict(self.gen, self.opt_g, model_state_dict=state["gen"], optim_state_dict=state["opt_g"])
        set_state_dict(self.critic, self.opt_c, model_state_dict=state["critic"], optim_state_dict=state["opt_c"])
        self.average.average = state["average"]
        self.draws.g.set_state(state["draws"])
        self.round = state["round"]

    @torch.no_grad()
    def distance(self):
        """Energy distance between averaged generator and data, on a batch of its own seed."""
        test = Draws(91, 256)
        test.mine = slice(None)
        real, c = test.real()
        self.average.swap()
        fake = self.gen(test.normal(LATENT), c)
        self.average.swap()
        return (2 * torch.cdist(real, fake).mean() - torch.cdist(real, real).mean() - torch.cdist(fake, fake).mean()).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--save-dir")
    parser.add_argument("--resume")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    trainer = GanTrainer(args)
    if args.resume:
        trainer.load(args.resume)
    while trainer.round < args.rounds:
        critic, gen = trainer.train_round()
        if dist.get_rank() == 0 and trainer.round % 6 == 0:
            print(f"round {trainer.round} critic {critic:.5f} generator {gen:.5f}", flush=True)
        if args.save_every and trainer.round % args.save_every == 0:
            trainer.save(args.save_dir)
    distance = trainer.distance()
    if dist.get_rank() == 0:
        print(f"energy distance of the averaged generator {distance:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
