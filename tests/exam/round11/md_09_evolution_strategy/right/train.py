"""Evolution strategies for a policy that is sharded over the ranks: no backward pass at all."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from noise import ParameterNoise
from walker import rollout


class Policy(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.act = nn.Linear(width, 2)

    def forward(self, obs):
        return self.act(self.body(obs))


@torch.no_grad()
def fitness(policy, episodes):
    """Mean return over the episodes, which are divided among the ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    total = rollout(policy, episodes[rank::world]).double().sum()
    dist.all_reduce(total)
    return total.item() / len(episodes)


def centred_ranks(values):
    order = torch.tensor(values).flatten().argsort().argsort().double()
    return (order / (order.numel() - 1) - 0.5).view(-1, 2).tolist()


@torch.no_grad()
def generation(policy, noise, momentum, number, args):
    episodes = torch.arange(args.episodes) + number * args.episodes
    centre = [p.detach().clone() for p in noise.params]
    values = []
    for pair in range(args.pairs):
        scores = []
        for sign in (1.0, -1.0):
            noise.shift(number, pair, sign * args.sigma)
            scores.append(fitness(policy, episodes))
            for p, c in zip(noise.params, centre):
                p.copy_(c)
        values.append(scores)
    shaped = centred_ranks(values)
    step = [torch.zeros_like(c) for c in centre]
    for pair, (plus, minus) in enumerate(shaped):
        for s, (_, eps) in zip(step, noise.direction(number, pair)):
            s.add_(eps, alpha=(plus - minus) / (2 * args.pairs * args.sigma))
    for p, m, s in zip(noise.params, momentum, step):
        m.mul_(args.momentum).add_(s)
        p.mul_(1 - args.lr * args.decay).add_(m, alpha=args.lr)
    return sum(sum(v) for v in values) / (2 * args.pairs)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--generations", type=int, default=12)
    ap.add_argument("--pairs", type=int, default=3)
    ap.add_argument("--episodes", type=int, default=16)
    ap.add_argument("--sigma", type=float, default=0.08)
    ap.add_argument("--lr", type=float, default=0.04)
    ap.add_argument("--momentum", type=float, default=0.8)
    ap.add_argument("--decay", type=float, default=0.01)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="es")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(2)
    policy = Policy()
    # the weights change between two evaluations, so they must be gathered anew every time
    fully_shard(policy.body, reshard_after_forward=True)
    fully_shard(policy, reshard_after_forward=True)
    noise = ParameterNoise(policy, seed=7)
    momentum = [torch.zeros_like(p) for p in noise.params]

    start = 0
    if args.resume:
        files = sorted(f for f in os.listdir(args.resume) if f.startswith("gen"))
        state = torch.load(os.path.join(args.resume, files[-1]))
        set_model_state_dict(policy, state["policy"], options=StateDictOptions(full_state_dict=True))
        for m, full in zip(momentum, state["momentum"]):
            m.copy_(distribute_tensor(full, m.device_mesh, m.placements))
        start = state["generation"]

    for number in range(start, args.generations):
        mean = generation(policy, noise, momentum, number, args)
        if rank == 0 and number % 3 == 0:
            print(f"generation {number} mean return {mean:.4f}")
        if args.save_every and (number + 1) % args.save_every == 0:
            weights = get_model_state_dict(policy, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            full = [m.full_tensor() for m in momentum]
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                torch.save({"policy": weights, "momentum": full, "generation": number + 1},
                           os.path.join(args.out, f"gen{number + 1:04d}.pt"))
            dist.barrier()

    if args.export:
        full = {k: v.full_tensor() for k, v in policy.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
