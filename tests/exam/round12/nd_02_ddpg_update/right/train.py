#!/usr/bin/env python
"""DDPG on logged transitions of a damped linear plant. Actor, critic and both targets are sharded.

    torchrun --nproc_per_node 2 train.py --save-every 12 --out runs/a
"""
import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.fsdp import fully_shard

OBS, ACT, HID = 8, 4, 32
FULL = StateDictOptions(full_state_dict=True)
SPREAD = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def mlp(n_in, n_out):
    return nn.Sequential(nn.Linear(n_in, HID), nn.Tanh(), nn.Linear(HID, HID), nn.Tanh(), nn.Linear(HID, n_out))


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(OBS, ACT)

    def forward(self, obs):
        return torch.tanh(self.net(obs))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(OBS + ACT, 1)

    def forward(self, obs, act):
        return self.net(torch.cat([obs, act], -1)).sum(-1)


class Replay:
    def __init__(self, n=1024, seed=3):
        g = torch.Generator().manual_seed(seed)
        A = 0.8 * torch.eye(OBS) + 0.1 * torch.randn(OBS, OBS, generator=g) / OBS ** 0.5
        B = 0.5 * torch.randn(ACT, OBS, generator=g) / ACT ** 0.5
        self.obs = torch.randn(n, OBS, generator=g)
        self.act = torch.rand(n, ACT, generator=g) * 2 - 1
        self.next = self.obs @ A.T + self.act @ B
        self.rew = -3.0 * self.next.pow(2).mean(-1) - 0.1 * self.act.pow(2).mean(-1)

    def sample(self, step, size, rank, world):
        g = torch.Generator().manual_seed(700 + step)
        idx = torch.randint(len(self.obs), (size,), generator=g).chunk(world)[rank]
        return self.obs[idx], self.act[idx], self.rew[idx], self.next[idx]


@torch.no_grad()
def polyak(target, online, tau):
    for t, p in zip(target.parameters(), online.parameters()):
        t.to_local().lerp_(p.to_local(), tau)


def mean_over_ranks(x):
    x = x.detach().clone()
    dist.all_reduce(x)
    return x.item() / dist.get_world_size()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--gamma", type=float, default=0.6)
    ap.add_argument("--tau", type=float, default=0.05)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    nets = {"actor": Actor(), "critic": Critic()}
    nets["actor_t"] = copy.deepcopy(nets["actor"]).requires_grad_(False)
    nets["critic_t"] = copy.deepcopy(nets["critic"]).requires_grad_(False)
    for net in nets.values():
        fully_shard(net, reshard_after_forward=True)
    actor, critic, actor_t, critic_t = nets.values()
    opts = {"actor": torch.optim.Adam(actor.parameters(), lr=1e-3, eps=1e-5),
            "critic": torch.optim.Adam(critic.parameters(), lr=1e-2, eps=1e-5)}
    replay = Replay()

    first = 0
    if args.resume:
        name = max((f for f in os.listdir(args.resume) if f.endswith(".pt")))
        state = torch.load(os.path.join(args.resume, name))
        for k, net in nets.items():
            set_model_state_dict(net, state[k], options=SPREAD)
        for k, opt in opts.items():
            set_optimizer_state_dict(nets[k], opt, state["opt_" + k], options=SPREAD)
        first = state["step"]

    for step in range(first, args.steps):
        obs, act, rew, nxt = replay.sample(step, args.batch, rank, world)

        # critic
        with torch.no_grad():
            y = rew + args.gamma * critic_t(nxt, actor_t(nxt))
        opts["critic"].zero_grad()
        td = F.mse_loss(critic(obs, act), y)
        td.backward()
        opts["critic"].step()

        # actor
        opts["actor"].zero_grad()
        pi = -critic(obs, actor(obs)).mean()
        pi.backward()
        opts["actor"].step()

        polyak(critic_t, critic, args.tau)
        polyak(actor_t, actor, args.tau)

        td, pi = mean_over_ranks(td), mean_over_ranks(pi)
        if rank == 0 and (step % 5 == 0 or step + 1 == args.steps):
            print(f"[{step + 1}/{args.steps}] td {td:.4f}  -Q {pi:.4f}", flush=True)

        if args.save_every and (step + 1) % args.save_every == 0 and step + 1 < args.steps:
            state = {k: get_model_state_dict(net, options=FULL) for k, net in nets.items()}
            state.update({"opt_" + k: get_optimizer_state_dict(nets[k], o, options=FULL) for k, o in opts.items()})
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                torch.save({**state, "step": step + 1}, os.path.join(args.out, f"ddpg_{step + 1:04d}.pt"))
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
