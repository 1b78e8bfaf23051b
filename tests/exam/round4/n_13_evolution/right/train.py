"""Evolution strategies on a sharded policy: no backward pass at all.

Every rank draws the same full perturbation from a seed and adds its own rows to its shards. A candidate is
played on the episodes of all ranks together, and the returns are summed before they are ranked.
"""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Policy(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, s):
        return torch.tanh(self.c(torch.tanh(self.b(torch.tanh(self.a(s))))))


def episode_return(policy, start, horizon=8):
    """Park a two-dimensional point mass with drag: one thrust along a rotating axis."""
    s, total = start, torch.zeros(len(start))
    for t in range(horizon):
        u = policy(s)
        pos, vel = s[:, :2], s[:, 2:]
        axis = torch.tensor([1.0, 0.0]) if t % 2 == 0 else torch.tensor([0.0, 1.0])
        vel = 0.8 * vel + 0.5 * u * axis
        s = torch.cat([pos + 0.5 * vel, vel], 1)
        total = total - s[:, :2].pow(2).sum(1) - 0.01 * u.squeeze(1) ** 2
    return total


class ShardedNoise:
    def __init__(self, model):
        self.params = list(model.parameters())

    def rows(self, seed):
        g = torch.Generator().manual_seed(seed)
        for p in self.params:
            parts = torch.randn(p.shape, generator=g).chunk(p.device_mesh.size())
            r = p.device_mesh.get_local_rank()
            yield p.to_local(), (parts[r] if r < len(parts) else parts[0][:0])

    def add(self, seed, scale):
        for w, e in self.rows(seed):
            w.add_(e, alpha=scale)


@torch.no_grad()
def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--pairs", type=int, default=4)
    ap.add_argument("--episodes", type=int, default=32)
    ap.add_argument("--sigma", type=float, default=0.1)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    policy = Policy()
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(policy.b, mesh=mesh, reshard_after_forward=True)
    # without a backward pass nothing else would free the gathered root weights between two candidates
    fully_shard(policy, mesh=mesh, reshard_after_forward=True)
    noise = ShardedNoise(policy)
    velocity = [torch.zeros_like(p.to_local()) for p in policy.parameters()]

    def score(starts):
        total = episode_return(policy, starts).sum()
        dist.all_reduce(total)
        return total / args.episodes

    for step in range(args.steps):
        g = torch.Generator().manual_seed(10_000 + step)
        starts = torch.randn(args.episodes, 4, generator=g).chunk(world)[rank]
        centre = score(starts)
        seeds = [step * args.pairs + i for i in range(args.pairs)]
        gain = []
        for seed in seeds:
            noise.add(seed, args.sigma)
            up = score(starts)
            noise.add(seed, -2 * args.sigma)
            down = score(starts)
            noise.add(seed, args.sigma)
            gain.append(up - down)
        gain = torch.stack(gain)
        gain = gain / (gain.pow(2).mean().sqrt() + 1e-8)
        for v in velocity:
            v.mul_(0.7)
        for seed, w in zip(seeds, gain.tolist()):
            for v, (_, e) in zip(velocity, noise.rows(seed)):
                v.add_(e, alpha=w / args.pairs)
        for v, p in zip(velocity, policy.parameters()):
            p.to_local().add_(v, alpha=args.lr)
        if rank == 0 and step % 3 == 0:
            print(f"generation {step} return {centre.item():.3f}", flush=True)

    if args.export:
        full = {k: v.full_tensor() for k, v in policy.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
