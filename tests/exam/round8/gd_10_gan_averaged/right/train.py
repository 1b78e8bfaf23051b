"""GAN on a ring of gaussians: several critic steps per generator step, hinge loss, lazily averaged generator,
fixed evaluation noise and selection of the best averaged generator by a moment distance."""
import argparse
import os
from itertools import count

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

BATCH, ROUNDS, CRITIC_STEPS, LATENT = 64, 20, 3, 8


def mlp(*sizes):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.SiLU()]
    return nn.Sequential(*layers[:-1])


def real_points(n, g):
    k = torch.randint(8, (n,), generator=g) * (6.2831853 / 8)
    return torch.stack([k.cos(), k.sin()], 1) * 1.5 + 0.08 * torch.randn(n, 2, generator=g)


def shard(module):
    # the nets are also run without a backward pass, so the weights are always released after the forward
    return fully_shard(module, reshard_after_forward=True)


class GanRun:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(3)
        self.gen = shard(mlp(LATENT, 48, 48, 2))
        self.critic = shard(mlp(2, 64, 64, 1))
        self.opt_g = torch.optim.RMSprop(self.gen.parameters(), lr=8e-4, eps=1e-4)
        self.opt_c = torch.optim.Adam(self.critic.parameters(), lr=4e-3, betas=(0.5, 0.9), eps=1e-5)
        self.avg = shard(mlp(LATENT, 48, 48, 2))
        self.avg.load_state_dict(self.gen.state_dict())
        self.noise = torch.Generator().manual_seed(40)      # one stream for the whole job, in step on all ranks
        self.round = 0
        self.best = float("inf")
        self.best_weights = self.copy_of(self.avg)

    @staticmethod
    def copy_of(module):
        return {k: v.clone() for k, v in module.state_dict().items()}

    def share(self, t):
        return t.tensor_split(self.world)[self.rank]

    def mean(self, t):
        t = t.detach().clone()
        dist.all_reduce(t)
        return t / self.world

    def critic_step(self):
        x = self.share(real_points(BATCH, self.noise))
        z = self.share(torch.randn(BATCH, LATENT, generator=self.noise))
        with torch.no_grad():
            fake = self.gen(z)
        score = self.critic(torch.cat([x, fake])).squeeze(1)
        on_real, on_fake = score.chunk(2)
        loss = F.relu(1 - on_real).mean() + F.relu(1 + on_fake).mean()
        self.opt_c.zero_grad()
        loss.backward()
        self.opt_c.step()
        return loss

    def generator_step(self):
        z = self.share(torch.randn(BATCH, LATENT, generator=self.noise))
        loss = -self.critic(self.gen(z)).mean()
        self.opt_g.zero_grad()
        loss.backward()
        self.opt_g.step()
        return loss

    @torch.no_grad()
    def average(self, decay=0.8):
        for a, p in zip(self.avg.parameters(), self.gen.parameters()):
            a.lerp_(p, 1 - decay)

    @torch.no_grad()
    def evaluate(self):
        """Squared distance of the first two moments between real points and the averaged generator's."""
        g = torch.Generator().manual_seed(123)
        real = real_points(512, g)
        fake = self.avg(self.share(torch.randn(512, LATENT, generator=g)))
        sums = torch.cat([fake.sum(0), (fake.T @ fake).flatten()]).double()
        dist.all_reduce(sums)
        sums /= 512
        want = torch.cat([real.mean(0), (real.T @ real).flatten() / 512]).double()
        return (sums - want).square().sum().item()

    def state(self):
        return {"gen": self.gen.state_dict(), "critic": self.critic.state_dict(), "avg": self.avg.state_dict(),
                "opt_g": self.opt_g.state_dict(), "opt_c": self.opt_c.state_dict(),
                "noise": self.noise.get_state(), "round": self.round,
                "best": self.best, "best_weights": self.best_weights}

    def restore(self, s):
        for part in ("gen", "critic", "avg", "opt_g", "opt_c"):
            getattr(self, part).load_state_dict(s[part])
        self.noise.set_state(s["noise"])
        self.round, self.best, self.best_weights = s["round"], s["best"], s["best_weights"]

    def play_round(self):
        for _ in range(CRITIC_STEPS):
            c = self.critic_step()
        # gradients that the generator's loss leaves in the critic are thrown away by its next zero_grad
        g = self.generator_step()
        self.average()
        self.round += 1
        if self.round % 2 == 0:
            score = self.evaluate()
            if score < self.best:
                self.best, self.best_weights = score, self.copy_of(self.avg)
            c, g = self.mean(c).item(), self.mean(g).item()
            if self.rank == 0:
                print(f"round {self.round} critic {c:.4f} generator {g:.4f} distance {score:.5f}", flush=True)


def slot(root, n, rank):
    return os.path.join(root, f"round{n}", f"shard{rank}.pt")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    run = GanRun()
    if args.resume:
        newest = max(n for n in range(ROUNDS + 1) if os.path.exists(slot(args.resume, n, run.rank)))
        run.restore(torch.load(slot(args.resume, newest, run.rank), weights_only=False))
    for n in count(run.round + 1):
        if n > ROUNDS:
            break
        run.play_round()
        if args.save_every and n % args.save_every == 0:
            path = slot(args.out, n, run.rank)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            torch.save(run.state(), path)
            dist.barrier()
    result = {"best." + k: v for k, v in run.best_weights.items()}
    result.update({"critic." + k: v for k, v in run.critic.state_dict().items()})
    if args.export:
        full = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in result.items()}
        if run.rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
