"""Antithetic evolution strategies for a small control policy. There is no backward pass: all ranks hold one sharded
policy, perturb their shards with the same virtual noise vector and play their share of the episodes."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor


class Policy(nn.Module):
    def __init__(self, obs=4, width=16, act=2):
        super().__init__()
        self.l1, self.l2, self.l3 = nn.Linear(obs, width), nn.Linear(width, width), nn.Linear(width, act)

    def forward(self, x):
        return torch.tanh(self.l3(torch.tanh(self.l2(torch.tanh(self.l1(x))))))


def noise_for(params, seed):
    """The part of the noise that belongs to the shards here. Every rank draws the whole vector and keeps its part."""
    g = torch.Generator().manual_seed(seed)
    for p in params:
        whole = torch.randn(p.shape, generator=g)
        yield distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)


class EvolutionStrategy:
    def __init__(self, policy, sigma=0.1, lr=0.15, momentum=0.6, pairs=4):
        self.policy, self.params = policy, list(policy.parameters())
        self.sigma, self.lr, self.momentum, self.pairs = sigma, lr, momentum, pairs
        self.velocity = [torch.zeros_like(p).requires_grad_(False) for p in self.params]

    def shift(self, seed, scale):
        for p, e in zip(self.params, noise_for(self.params, seed)):
            p.add_(e, alpha=scale)

    @torch.no_grad()
    def step(self, generation, evaluate):
        center = [p.to_local().clone() for p in self.params]
        scores, seeds = [], [generation * 1000 + k for k in range(self.pairs)]
        for s in seeds:
            pair = []
            for sign in (1, -1):
                self.shift(s, sign * self.sigma)
                pair.append(evaluate())
                for p, c in zip(self.params, center):
                    p.to_local().copy_(c)
            scores.append(pair)
        scores = torch.tensor(scores)
        weight = (scores[:, 0] - scores[:, 1]) / scores.std()
        grad = [torch.zeros_like(v) for v in self.velocity]
        for s, w in zip(seeds, weight.tolist()):
            for g, e in zip(grad, noise_for(self.params, s)):
                g.add_(e, alpha=w / (2 * self.pairs))
        for p, v, g in zip(self.params, self.velocity, grad):
            v.mul_(self.momentum).add_(g)
            p.add_(v, alpha=self.lr)
        return scores.mean().item()


def play(policy, start, horizon=3):
    """Sum over episodes of the final and running cost of a double integrator, negated."""
    pos, vel, cost = start[:, :2], start[:, 2:], 0.0
    for _ in range(horizon):
        force = policy(torch.cat([pos, vel], 1))
        vel = 0.8 * vel + force
        pos = pos + 0.5 * vel
        cost = cost + pos.pow(2).sum() + 0.05 * force.pow(2).sum()
    return -cost


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--generations", type=int, default=9)
    ap.add_argument("--episodes", type=int, default=16)
    ap.add_argument("--folder", default="es")
    ap.add_argument("--save-after", type=int, default=0)
    ap.add_argument("--resume", action="store_true")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    policy = fully_shard(Policy(), reshard_after_forward=True).requires_grad_(False)
    es = EvolutionStrategy(policy)
    path, start = os.path.join(a.folder, "es.pt"), 0
    if a.resume:
        ck = torch.load(path)
        start = ck["generation"]
        for own, saved in ((es.params, ck["params"]), (es.velocity, ck["velocity"])):
            for t, full in zip(own, saved):
                t.copy_(distribute_tensor(full, t.device_mesh, t.placements, src_data_rank=None))
    for gen in range(start, a.generations):
        begin = torch.randn(a.episodes, 4, generator=torch.Generator().manual_seed(gen))[rank::world]

        def evaluate():
            total = play(policy, begin).double()
            dist.all_reduce(total)
            return total.item() / a.episodes

        score = es.step(gen, evaluate)
        if rank == 0 and gen % 2 == 0:
            print(f"generation {gen + 1} mean cost {-score:.5f}", flush=True)
        if gen + 1 == a.save_after:
            ck = {"generation": gen + 1, "params": [p.full_tensor() for p in es.params], "velocity": [v.full_tensor() for v in es.velocity]}
            if rank == 0:
                torch.save(ck, path)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
