"""Decision transformer on logged episodes of different quality, optimizer inside the backward pass."""
import argparse
import glob
import math
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from fused import FusedAdam, local
from model import DecisionTransformer

H = 8


def episodes(n=512, seed=44):
    g = torch.Generator().manual_seed(seed)
    obs, acts, rews = [torch.randn(n, 4, generator=g)], [], []
    skill = torch.rand(n, 1, generator=g)
    for _ in range(H):
        o = obs[-1]
        a = skill * -(o[:, :2] + 0.5 * o[:, 2:]) + (1 - skill) * torch.randn(n, 2, generator=g)
        vel = 0.8 * o[:, 2:] + 0.4 * a
        pos = o[:, :2] + 0.4 * vel
        rews.append(-pos.square().sum(-1))
        acts.append(a)
        obs.append(torch.cat([pos, vel], -1))
    rtg = torch.stack(rews, 1).flip(1).cumsum(1).flip(1)[..., None] / 10
    length = torch.randint(3, H + 1, (n,), generator=g)
    mask = (torch.arange(H) < length[:, None]).float()
    return rtg, torch.stack(obs[:H], 1), torch.stack(acts, 1), mask


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=9)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    model = DecisionTransformer()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    adam = FusedAdam(model.named_parameters(), lr=3e-3)
    data = episodes()

    start = 0
    if args.resume:
        path = max(glob.glob(os.path.join(args.resume, f"step*.{rank}-of-{world}.pt")))
        blob = torch.load(path)
        with torch.no_grad():
            for n, p in model.named_parameters():
                local(p.data).copy_(blob["model"][n])
        adam.load_state_dict(blob["adam"])
        start = blob["step"]

    for step in range(start, args.steps):
        idx = torch.randperm(512, generator=torch.Generator().manual_seed(300 + step))[: args.batch]
        real = data[3][idx].sum()
        rtg, obs, act, mask = (t[idx.chunk(world)[rank]] for t in data)
        error = (model(rtg, obs, act) - act).square().mean(-1)
        loss = (error * mask).sum() * world / real
        adam.begin(min(1.0, (step + 1) / 5) * (0.55 + 0.45 * math.cos(math.pi * step / args.steps)))
        loss.backward()

        total = loss.detach() / world
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step + 1} action error {total:.6f}", flush=True)
        if args.out and (step + 1) % args.save_every == 0:
            os.makedirs(args.out, exist_ok=True)
            blob = {"model": {n: local(p.data) for n, p in model.named_parameters()},
                    "adam": adam.state_dict(), "step": step + 1}
            torch.save(blob, os.path.join(args.out, f"step{step + 1:05d}.{rank}-of-{world}.pt"))
            dist.barrier()

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
