"""Double DQN with prioritised replay: Q net and Polyak target are both FSDP2 modules, the worlds are divided over the ranks."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from env import Grid
from replay import SharedReplay

WORLDS, BATCH, UPDATES, PLAY, GAMMA, TAU = 8, 32, 24, 3, 0.9, 0.1


class Dueling(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.value = nn.Linear(48, 1)
        self.advantage = nn.Linear(48, 4)

    def forward(self, x):
        h = self.body(x)
        a = self.advantage(h)
        return self.value(h) + a - a.mean(-1, keepdim=True)


def sharded_net():
    net = Dueling()
    fully_shard(net.body)
    return fully_shard(net, reshard_after_forward=True)


class Agent:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.q = sharded_net()
        self.target = sharded_net()
        self.target.load_state_dict(self.q.state_dict())
        self.target.requires_grad_(False)
        self.opt = torch.optim.Adam(self.q.parameters(), lr=5e-3, eps=1e-5)
        per_rank = WORLDS // self.world
        self.grids = [Grid(n) for n in range(self.rank * per_rank, (self.rank + 1) * per_rank)]
        self.replay = SharedReplay(400, 6)
        self.dice = torch.Generator().manual_seed(55)
        self.done_updates = 0

    @torch.no_grad()
    def play(self, turns):
        epsilon = max(0.1, 1.0 - self.done_updates / 15)
        for _ in range(turns):
            obs = torch.stack([grid.observe() for grid in self.grids])
            rows = []
            for grid, o, q in zip(self.grids, obs, self.q(obs)):
                a = grid.choose(q, epsilon)
                nxt, reward, done = grid.act(a)
                rows.append((o, a, reward, nxt, float(done)))
            self.replay.add(rows)

    def update(self):
        index, weight = self.replay.sample(BATCH, self.dice)
        mine = torch.arange(BATCH).tensor_split(self.world)[self.rank]
        index_here, weight = index[mine], weight[mine]
        r = self.replay
        with torch.no_grad():
            best = self.q(r.next[index_here]).argmax(1)
            future = self.target(r.next[index_here]).gather(1, best[:, None])[:, 0]
            goal = r.reward[index_here] + GAMMA * (1 - r.done[index_here]) * future
        value = self.q(r.obs[index_here]).gather(1, r.action[index_here, None])[:, 0]
        loss = (weight * F.smooth_l1_loss(value, goal, reduction="none")).mean()
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        with torch.no_grad():
            for t, p in zip(self.target.parameters(), self.q.parameters()):
                t.lerp_(p, TAU)
        errors = [torch.empty(len(mine)) for _ in range(self.world)]
        dist.all_gather(errors, (goal - value).detach().abs())
        r.priority[index] = torch.cat(errors) + 1e-3
        self.done_updates += 1
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        return shown.item() / self.world

    def state_dict(self):
        return {"q": self.q.state_dict(), "target": self.target.state_dict(), "opt": self.opt.state_dict(),
                "grids": [g.state_dict() for g in self.grids], "replay": self.replay.state_dict(),
                "dice": self.dice.get_state(), "done_updates": self.done_updates}

    def load_state_dict(self, s):
        self.q.load_state_dict(s["q"])
        self.target.load_state_dict(s["target"])
        self.opt.load_state_dict(s["opt"])
        for grid, state in zip(self.grids, s["grids"]):
            grid.load_state_dict(state)
        self.replay.load_state_dict(s["replay"])
        self.dice.set_state(s["dice"])
        self.done_updates = s["done_updates"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    agent = Agent()
    if args.resume:
        last = max((d for d in os.listdir(args.resume)), key=lambda d: int(d.split("-")[1]))
        agent.load_state_dict(torch.load(os.path.join(args.resume, last, f"agent{agent.rank}.pt"), weights_only=False))
    else:
        agent.play(10)
    while agent.done_updates < UPDATES:
        agent.play(PLAY)
        loss = agent.update()
        n = agent.done_updates
        if agent.rank == 0 and n % 4 == 0:
            recent = agent.replay.reward[:agent.replay.filled][-100:].mean().item()
            print(f"update {n} loss {loss:.4f} reward {recent:.3f}", flush=True)
        if args.save_every and n % args.save_every == 0:
            folder = os.path.join(args.out, f"update-{n}")
            os.makedirs(folder, exist_ok=True)
            torch.save(agent.state_dict(), os.path.join(folder, f"agent{agent.rank}.pt"))
            dist.barrier()
    if args.export:
        both = {f"{net}.{k}": v for net in ("q", "target") for k, v in getattr(agent, net).state_dict().items()}
        full = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in both.items()}
        if agent.rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
