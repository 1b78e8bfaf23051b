"""Evolution strategy for a small control policy: no backward pass at all.

Every generation all ranks see the same antithetic perturbations of the (sharded) weights. The start states
are divided over the ranks and the returns are averaged with an all-reduce, so each rank can update its
own shard of the weights with momentum.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


class Policy(nn.Module):
    def __init__(self, obs=4, hidden=24, act=1):
        super().__init__()
        self.l1 = nn.Linear(obs, hidden)
        self.l2 = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, act)

    def forward(self, s):
        return torch.tanh(self.out(torch.tanh(self.l2(torch.tanh(self.l1(s))))))


def rollout(policy, state, steps=12, dt=0.15):
    """Two coupled oscillators pushed by the policy; negative mean cost of every start state."""
    x, v = state.chunk(2, -1)
    cost = torch.zeros(len(state))
    for _ in range(steps):
        force = policy(torch.cat([x, v], -1))
        acc = -x + 0.5 * x.flip(-1) + 2.0 * force
        v = v + dt * acc
        x = x + dt * v
        cost = cost + (x.square() + 0.1 * v.square()).sum(-1) + 0.01 * force.square().sum(-1)
    return -cost / steps


class EvolutionStrategy:
    def __init__(self, policy, sigma, lr, pairs, momentum=0.8):
        self.policy, self.sigma, self.lr, self.pairs, self.momentum = policy, sigma, lr, pairs, momentum
        self.params = list(policy.parameters())
        self.velocity = [torch.zeros_like(p.to_local()) for p in self.params]
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def shard(self, full):
        """This rank's rows of a full tensor, divided as fully_shard does it."""
        chunks = list(full.chunk(self.world, dim=0))
        return chunks[self.rank] if self.rank < len(chunks) else full[:0]

    def noise(self, generation, pair):
        g = torch.Generator().manual_seed(generation * 1009 + pair)
        return [self.shard(torch.randn(p.shape, generator=g)) for p in self.params]

    def add(self, noise, scale):
        for p, n in zip(self.params, noise):
            p.to_local().add_(n, alpha=scale)

    @torch.no_grad()
    def fitness(self, states):
        total = rollout(self.policy, states).double().sum()
        return total

    @torch.no_grad()
    def generation(self, index, states, global_states):
        returns = torch.zeros(self.pairs, 2, dtype=torch.float64)
        backup = [p.to_local().clone() for p in self.params]
        for k in range(self.pairs):
            noise = self.noise(index, k)
            for side, sign in enumerate((1.0, -1.0)):
                self.add(noise, sign * self.sigma)
                returns[k, side] = self.fitness(states)
                for p, b in zip(self.params, backup):
                    p.to_local().copy_(b)
        dist.all_reduce(returns)
        returns /= global_states
        # normalise by the spread of all returns of the generation
        weight = (returns[:, 0] - returns[:, 1]) / (returns.std() + 1e-8)
        for v in self.velocity:
            v.mul_(self.momentum)
        for k in range(self.pairs):
            for v, n in zip(self.velocity, self.noise(index, k)):
                v.add_(n, alpha=weight[k].item() / (2 * self.pairs))
        self.add(self.velocity, self.lr)
        return returns.mean().item()


def start_states(generation, n):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(50_000 + generation))


def save(folder, gen, es):
    os.makedirs(folder, exist_ok=True)
    blob = {"gen": gen, "world": es.world, "params": [p.to_local() for p in es.params], "velocity": es.velocity}
    torch.save(blob, f"{folder}/gen{gen:05d}.rank{es.rank}")


def load(folder, es):
    mine = sorted(f for f in os.listdir(folder) if f.endswith(f".rank{es.rank}"))
    blob = torch.load(os.path.join(folder, mine[-1]))
    if blob["world"] != es.world:
        raise ValueError("the checkpoint is of another number of ranks")
    with torch.no_grad():
        for p, s in zip(es.params, blob["params"]):
            p.to_local().copy_(s)
    es.velocity = blob["velocity"]
    return blob["gen"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--generations", type=int, default=14)
    ap.add_argument("--pairs", type=int, default=6)
    ap.add_argument("--states", type=int, default=16)
    ap.add_argument("--sigma", type=float, default=0.1)
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="es_ckpt")
    ap.add_argument("--resume", default=None)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    policy = Policy()
    # the weights change between forwards without an optimizer, hence reshard after every forward (root too)
    fully_shard(policy, reshard_after_forward=True)
    es = EvolutionStrategy(policy, args.sigma, args.lr, args.pairs)

    first = load(args.resume, es) if args.resume else 0
    for gen in range(first, args.generations):
        states = start_states(gen, args.states)
        mean_return = es.generation(gen, states.chunk(es.world)[es.rank], len(states))
        if es.rank == 0:
            print(f"generation {gen + 1:3d} return {mean_return:.6f} loss {-mean_return:.6f}")
        if args.save_every and (gen + 1) % args.save_every == 0:
            save(args.out, gen + 1, es)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
