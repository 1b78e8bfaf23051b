"""Neural-linear Thompson sampling. The feature network is sharded and trained on the whole history,
decisions come from per-arm Bayesian regressions in float64 that are rebuilt when the features have moved."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from posterior import ArmPosterior

ARMS, CONTEXT, FEATS, USERS = 4, 8, 12, 48


class FeatureNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(CONTEXT, 40), nn.Tanh(), nn.Linear(40, FEATS), nn.Tanh())
        self.heads = nn.Linear(FEATS, ARMS)

    def forward(self, x):
        return self.trunk(x)

    def all_arms(self, x):
        return self.heads(self.trunk(x))


class World:
    def __init__(self):
        g = torch.Generator().manual_seed(60)
        self.w1 = torch.randn(CONTEXT, ARMS, generator=g)
        self.w2 = torch.randn(CONTEXT, ARMS, generator=g)

    def means(self, x):
        return torch.sin(x @ self.w1) + 0.3 * (x @ self.w2)


def gather(t):
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts)


def save(folder, rnd, rank, net, velocity, posterior, history, random, regret):
    os.makedirs(folder, exist_ok=True)
    torch.save({"net": [p.to_local() for p in net.parameters()], "velocity": velocity,
                "xx": posterior.xx, "xy": posterior.xy, "history": history,
                "random": random.get_state(), "regret": regret, "round": rnd},
               os.path.join(folder, f"round{rnd:04d}.rank{rank}"))
    dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rounds", type=int, default=20)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=8)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(12)
    net = FeatureNet()
    fully_shard(net, reshard_after_forward=True)
    register_fsdp_forward_method(net, "all_arms")
    bandit, posterior = World(), ArmPosterior(ARMS, FEATS)
    random = torch.Generator().manual_seed(61)
    velocity = [torch.zeros_like(p.to_local()) for p in net.parameters()]
    history = {"x": torch.zeros(0, CONTEXT), "arm": torch.zeros(0, dtype=torch.long), "r": torch.zeros(0)}
    regret, first = torch.zeros((), dtype=torch.float64), 0

    if args.resume:
        name = max(n for n in os.listdir(args.resume) if n.endswith(f".rank{rank}"))
        s = torch.load(os.path.join(args.resume, name))
        with torch.no_grad():
            for p, saved in zip(net.parameters(), s["net"]):
                p.to_local().copy_(saved)
        velocity, history, regret, first = s["velocity"], s["history"], s["regret"], s["round"]
        posterior.xx, posterior.xy = s["xx"], s["xy"]
        random.set_state(s["random"])

    for rnd in range(first, args.rounds):
        # act: every rank serves its part of the users with the same posterior draw
        x = torch.randn(USERS, CONTEXT, generator=random).chunk(world)[rank]
        noise = (0.1 * torch.randn(USERS, generator=random)).chunk(world)[rank]
        theta = posterior.draw(random)
        with torch.no_grad():
            feats = net(x)
        arm = (feats.double() @ theta.T).argmax(1)
        means = bandit.means(x)
        got = means.gather(1, arm[:, None]).squeeze(1)
        posterior.add(feats, arm, got + noise)
        lost = (means.amax(1) - got).sum().double()
        dist.all_reduce(lost)
        regret += lost
        for key, value in (("x", x), ("arm", arm), ("r", got + noise)):
            history[key] = torch.cat([history[key], gather(value)])

        # learn: three momentum steps on random rows of the history, updates written by hand
        for _ in range(3):
            idx = torch.randint(0, len(history["r"]), (96,), generator=random).chunk(world)[rank]
            pred = net.all_arms(history["x"][idx]).gather(1, history["arm"][idx, None]).squeeze(1)
            loss = (pred - history["r"][idx]).square().mean()
            loss.backward()
            with torch.no_grad():
                for p, v in zip(net.parameters(), velocity):
                    v.mul_(0.8).add_(p.grad.to_local())
                    p.to_local().sub_(0.05 * v)
                    p.grad = None

        # the features have moved: rebuild the regressions from the whole history
        if (rnd + 1) % 5 == 0:
            part = {k: v.tensor_split(world)[rank] for k, v in history.items()}
            with torch.no_grad():
                posterior.rebuild(net(part["x"]), part["arm"], part["r"])

        loss = loss.detach() / world
        dist.all_reduce(loss)
        if rank == 0:
            print(f"round {rnd + 1} loss {loss:.5f} regret per user {lost.item() / USERS:.5f} total {regret.item():.3f}", flush=True)
        if args.out and (rnd + 1) % args.save_every == 0:
            save(args.out, rnd + 1, rank, net, velocity, posterior, history, random, regret)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
