"""OpenAI-style evolution strategies for a contextual bandit policy whose weights are sharded with FSDP2.

There is no backward pass.  Every member of the population is a perturbation of the weights; all ranks
evaluate the same member, each on its part of the contexts, and update their own rows of the weights.
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

CONTEXT, ARMS = 8, 5


def reward_table(contexts):
    g = torch.Generator().manual_seed(404)
    w1 = torch.randn(CONTEXT, 16, generator=g)
    w2 = torch.randn(16, ARMS, generator=g) / 4
    return torch.tanh(contexts @ w1) @ w2


class ShardedES:
    def __init__(self, model, pairs, sigma, lr, momentum, seed):
        self.model, self.pairs, self.sigma = model, pairs, sigma
        self.lr, self.momentum, self.seed = lr, momentum, seed
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.params = list(model.parameters())
        self.center = [p.detach().to_local().clone() for p in self.params]
        self.velocity = [torch.zeros_like(c) for c in self.center]
        self.generation = 0

    def my_rows(self, full):
        parts = full.chunk(self.world)
        return parts[self.rank] if self.rank < len(parts) else full[:0]

    def noise(self, member):
        """The member's direction, drawn in full on every rank from the same seed, cut to this rank's rows."""
        g = torch.Generator().manual_seed(self.seed + 100_000 * self.generation + member)
        return [self.my_rows(torch.randn(p.shape, generator=g)) for p in self.params]

    def set_weights(self, direction, scale):
        for p, c, e in zip(self.params, self.center, direction):
            p.to_local().copy_(c + scale * e)

    @torch.no_grad()
    def step(self, fitness_of):
        fitness = torch.zeros(2 * self.pairs, dtype=torch.float64)
        for member in range(self.pairs):
            direction = self.noise(member)
            for sign in (0, 1):
                self.set_weights(direction, self.sigma * (1 - 2 * sign))
                fitness[2 * member + sign] = fitness_of(self.model)
        dist.all_reduce(fitness)
        # centred ranks in [-0.5, 0.5]
        shaped = fitness.argsort().argsort().float() / (len(fitness) - 1) - 0.5
        for v in self.velocity:
            v.mul_(self.momentum)
        for member in range(self.pairs):
            weight = (shaped[2 * member] - shaped[2 * member + 1]) / (2 * self.pairs * self.sigma)
            for v, e in zip(self.velocity, self.noise(member)):
                v.add_(e, alpha=weight.item())
        for p, c, v in zip(self.params, self.center, self.velocity):
            c.add_(v, alpha=self.lr)
            p.to_local().copy_(c)
        self.generation += 1
        return fitness.mean()

    def state_dict(self):
        return {"center": self.center, "velocity": self.velocity, "generation": self.generation}

    @torch.no_grad()
    def load_state_dict(self, state):
        self.center, self.velocity = state["center"], state["velocity"]
        self.generation = state["generation"]
        for p, c in zip(self.params, self.center):
            p.to_local().copy_(c)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--generations", type=int, default=16)
    ap.add_argument("--pairs", type=int, default=6)
    ap.add_argument("--contexts", type=int, default=256)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="es")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(CONTEXT, 24), nn.Tanh(), nn.Linear(24, ARMS))
    fully_shard(model, reshard_after_forward=True)  # the next member needs a new gather
    es = ShardedES(model, args.pairs, sigma=0.1, lr=0.05, momentum=0.8, seed=50)
    if args.resume:
        newest = max(int(f.split("-")[0][3:]) for f in os.listdir(args.resume))
        es.load_state_dict(torch.load(os.path.join(args.resume, f"gen{newest}-{rank}.pt")))

    while es.generation < args.generations:
        g = torch.Generator().manual_seed(7000 + es.generation)
        contexts = torch.randn(args.contexts, CONTEXT, generator=g).chunk(world)[rank]
        rewards = reward_table(contexts)

        def fitness_of(policy):
            expected = (torch.softmax(policy(contexts), dim=1) * rewards).sum(1)
            return expected.double().sum() / args.contexts

        mean = es.step(fitness_of)
        if rank == 0:
            print(f"generation {es.generation} mean fitness {mean.item():.5f}", flush=True)
        if args.save_every and es.generation % args.save_every == 0:
            os.makedirs(args.out, exist_ok=True)
            torch.save(es.state_dict(), os.path.join(args.out, f"gen{es.generation}-{rank}.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
