"""Double DQN. Every rank plays its own environments, but all ranks hold the same replay memory (transitions are exchanged
in the order of the environments), so a batch is drawn once and divided. The target network is a second FSDP module that
is moved shard by shard."""

import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

SIZE, ACTIONS = 7, 4
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class DuelingQ(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.adv, self.val = nn.Linear(width, ACTIONS), nn.Linear(width, 1)

    def forward(self, s):
        h = self.body(s)
        a = self.adv(h)
        return self.val(h) + a - a.mean(-1, keepdim=True)


def shard(net):
    fully_shard(net.body)
    return fully_shard(net, reshard_after_forward=True)


class Grid:
    """Vectorised walk to a goal; all randomness comes from (time, environment)."""

    MOVE = torch.tensor([[1, 0], [-1, 0], [0, 1], [0, -1]])

    def __init__(self, ids):
        self.ids = ids
        self.cells = torch.stack([self.fresh(0, i) for i in ids])  # x, y, goal x, goal y

    @staticmethod
    def fresh(t, i):
        return torch.randint(0, SIZE, (4,), generator=torch.Generator().manual_seed(t * 64 + i))

    def obs(self):
        return self.cells.float() / SIZE * 2 - 1

    def step(self, t, action):
        before = self.obs()
        gap = (self.cells[:, :2] - self.cells[:, 2:]).abs().sum(1)
        self.cells[:, :2] = (self.cells[:, :2] + self.MOVE[action]).clamp(0, SIZE - 1)
        left = (self.cells[:, :2] - self.cells[:, 2:]).abs().sum(1)
        done = left == 0
        reward = (gap - left).float() * 0.2 + done.float()
        row = torch.cat([before, action[:, None].float(), reward[:, None], self.obs(), done[:, None].float()], 1)
        for k in done.nonzero().flatten().tolist():
            self.cells[k] = self.fresh(t + 1, self.ids[k])
        return row


def from_everyone(x, world):
    """rows of env 0, 1, 2, ... when env i lives on rank i % world"""
    parts = [torch.empty_like(x) for _ in range(world)]
    dist.all_gather(parts, x.contiguous())
    return torch.stack(parts, 1).flatten(0, 1)


@torch.no_grad()
def follow(target, online, tau):
    for t, o in zip(target.parameters(), online.parameters()):
        t.to_local().lerp_(o.to_local(), tau)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--envs", type=int, default=8)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--play", type=int, default=4, help="environment steps before each update")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(9)
    plain = DuelingQ()
    target = shard(copy.deepcopy(plain)).requires_grad_(False)
    online = shard(plain)
    optim = torch.optim.AdamW(online.parameters(), lr=4e-3, eps=1e-5)
    env = Grid(list(range(rank, args.envs, world)))
    memory, start = torch.empty(0, 11), 0

    if args.resume:
        names = sorted(os.listdir(args.resume))
        s = torch.load(os.path.join(args.resume, names[-1]), weights_only=True)
        set_state_dict(online, optim, model_state_dict=s["online"], optim_state_dict=s["optim"], options=FULL)
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        set_model_state_dict(target, s["target"], options=FULL)
        env.cells, memory, start = s["cells"][rank::world].clone(), s["memory"], s["step"]

    for step in range(start, args.steps):
        epsilon = max(0.1, 1.0 - step / 20)
        for k in range(args.play):
            t = step * args.play + k
            draw = torch.rand(args.envs, 2, generator=torch.Generator().manual_seed(50_000 + t))[rank::world]
            with torch.no_grad():
                greedy = online(env.obs()).argmax(-1)
            action = torch.where(draw[:, 0] < epsilon, (draw[:, 1] * ACTIONS).long(), greedy)
            memory = torch.cat([memory, from_everyone(env.step(t, action), world)])[-2000:]

        pick = torch.randint(0, len(memory), (args.batch,), generator=torch.Generator().manual_seed(70_000 + step))
        rows = memory[pick][rank::world]
        s, a, r, s2, done = rows[:, :4], rows[:, 4].long(), rows[:, 5], rows[:, 6:10], rows[:, 10]
        with torch.no_grad():
            best = online(s2).argmax(-1, keepdim=True)
            goal = r + 0.9 * (1 - done) * target(s2).gather(1, best).squeeze(1)
        q = online(s).gather(1, a[:, None]).squeeze(1)
        loss = F.smooth_l1_loss(q, goal)
        optim.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(online.parameters(), 2.0)
        optim.step()
        follow(target, online, 0.1)

        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            recent = memory[-4 * args.envs :, 5].mean()
            print(
                f"update {step:3d} loss {shown / world:.4f} recent reward {recent:+.3f} memory {len(memory)}",
                flush=True,
            )
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            m, o = get_state_dict(online, optim, options=FULL)
            tsd = {k: v.full_tensor() for k, v in target.state_dict().items()}
            cells = from_everyone(env.cells, world)
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                torch.save(
                    {"online": m, "optim": o, "target": tsd, "cells": cells, "memory": memory, "step": step + 1},
                    os.path.join(args.out, f"dqn{step + 1:05d}.pt"),
                )
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
