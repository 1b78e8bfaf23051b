"""Evolution strategy for a pendulum-like task. There is no backward pass: the sharded weights are perturbed
by antithetic noise, the rewards of the episodes are summed over the ranks and the update is formed shard by shard.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

PAIRS, SIGMA, LR, ITERATIONS, EPISODES = 4, 0.1, 0.3, 14, 16


def policy():
    net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    fully_shard(net[2])
    # the weights change between forward passes without a backward, so nothing may stay gathered
    fully_shard(net, reshard_after_forward=True)
    return net


@torch.no_grad()
def episode_return(net, start):
    angle, speed = start.unbind(1)
    total = torch.zeros_like(angle)
    for _ in range(7):
        torque = torch.tanh(net(torch.stack([angle.sin(), angle.cos(), speed], 1))).squeeze(1)
        speed = 0.98 * speed + 0.3 * angle.sin() + 0.8 * torque
        angle = angle + 0.2 * speed
        total += torch.cos(angle) - 0.05 * torque ** 2
    return total


def like(full, p):
    if isinstance(p, DTensor):
        return distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None)
    return full


class Noise:
    """The noise of a pair is a function of (iteration, pair): it is drawn in full and cut as the parameter is."""

    def __init__(self, params):
        self.params = params

    def __call__(self, it, pair):
        g = torch.Generator().manual_seed(it * 1000 + pair)
        return [like(torch.randn(p.shape, generator=g), p) for p in self.params]


@torch.no_grad()
def shift(params, noise, scale):
    for p, e in zip(params, noise):
        p.add_(e, alpha=scale)


@torch.no_grad()
def restore(params, base):
    for p, b in zip(params, base):
        p.copy_(b)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = policy()
    params = [p.requires_grad_(False) for p in net.parameters()]
    noise = Noise(params)
    velocity = [torch.zeros_like(p) for p in params]
    it = 0

    def state():
        return {"net": get_model_state_dict(net), "it": it, "velocity": {str(i): v for i, v in enumerate(velocity)}}

    if args.resume:
        sd = state()
        dcp.load(sd, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume), key=int)))
        set_model_state_dict(net, sd["net"])
        it = sd["it"]

    while it < ITERATIONS:
        g = torch.Generator().manual_seed(50_000 + it)
        starts = (torch.rand(EPISODES, 2, generator=g) - 0.5) * torch.tensor([2.0, 1.0])
        starts = starts.chunk(world)[rank]
        base = [p.clone() for p in params]
        scores = torch.zeros(PAIRS, 2, dtype=torch.float64)
        for pair in range(PAIRS):
            eps = noise(it, pair)
            for side, sign in enumerate((1.0, -1.0)):
                shift(params, eps, sign * SIGMA)
                scores[pair, side] = episode_return(net, starts).double().sum()
                restore(params, base)
        dist.all_reduce(scores)
        scores /= EPISODES
        advantage = (scores[:, 0] - scores[:, 1]) / (scores.std() + 1e-6)
        with torch.no_grad():
            for v in velocity:
                v.mul_(0.7)
            for pair in range(PAIRS):
                shift(velocity, noise(it, pair), advantage[pair].item() / (2 * PAIRS))
            shift(params, velocity, LR)
        it += 1
        if rank == 0:
            print(f"iteration {it} mean return {scores.mean().item():.5f}", flush=True)
        if args.out and args.save_every and it % args.save_every == 0:
            dcp.save(state(), checkpoint_id=os.path.join(args.out, str(it)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
