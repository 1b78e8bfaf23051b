import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from replay import Replay
from world import Corridors


class Dueling(nn.Module):
    def __init__(self, obs=22, hidden=48, actions=4):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.value, self.advantage = nn.Linear(hidden, 1), nn.Linear(hidden, actions)

    def forward(self, x):
        h = self.body(x)
        a = self.advantage(h)
        return self.value(h) + a - a.mean(1, keepdim=True)


def build():
    net = Dueling()
    fully_shard(net.body)
    # target and acting passes have no backward after them: give the gathered weights back after each forward
    return fully_shard(net, reshard_after_forward=True)


class Agent:
    def __init__(self, args):
        self.args, self.rank, self.world = args, dist.get_rank(), dist.get_world_size()
        torch.manual_seed(50)
        self.online, self.target = build(), build()
        self.target.requires_grad_(False)
        self.follow(1.0)
        self.optim = torch.optim.Adam(self.online.parameters(), lr=args.lr)
        self.envs = Corridors(args.envs)
        self.replay = Replay(args.capacity, 22)
        self.gen = torch.Generator().manual_seed(51)
        self.envs.reset(torch.ones(args.envs, dtype=torch.bool), self.gen)
        self.step = 0

    @torch.no_grad()
    def follow(self, rate):
        for t, p in zip(self.target.parameters(), self.online.parameters()):
            t.lerp_(p, rate)

    def everywhere(self, mine):
        parts = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(parts, mine.contiguous())
        return torch.cat(parts)

    def part(self, t):
        return t.chunk(self.world)[self.rank]

    @torch.no_grad()
    def act(self, epsilon):
        """Each rank evaluates its share of the environments; the actions are exchanged."""
        obs = self.envs.observe()
        action = self.everywhere(self.online(self.part(obs)).argmax(1))
        wild = torch.rand(self.args.envs, generator=self.gen) < epsilon
        action = torch.where(wild, torch.randint(0, 4, (self.args.envs,), generator=self.gen), action)
        reward, over, late = self.envs.step(action)
        self.replay.add(obs=obs, action=action, reward=reward, next=self.envs.observe(), done=over)
        self.envs.reset(over | late, self.gen)
        return reward.mean().item()

    def learn(self):
        rows, weight = self.replay.sample(self.args.batch, 0.5, self.gen)
        b = {k: v[self.part(rows)] for k, v in self.replay.data.items() if k not in ("priority", "cursor")}
        with torch.no_grad():
            best = self.online(b["next"]).argmax(1, keepdim=True)
            goal = b["reward"] + 0.95 * (1 - b["done"]) * self.target(b["next"]).gather(1, best)[:, 0]
        error = goal - self.online(b["obs"]).gather(1, b["action"][:, None])[:, 0]
        loss = (self.part(weight) * nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none")).mean()
        self.optim.zero_grad()
        loss.backward()
        self.optim.step()
        self.follow(0.05)
        self.replay.data["priority"][rows] = self.everywhere(error.detach().abs()) + 1e-3
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean.item() / self.world

    def state(self):
        model, optim = get_state_dict(self.online, self.optim)
        return {
            "online": model, "optim": optim, "target": get_model_state_dict(self.target), "envs": self.envs.state,
            "replay": self.replay.data, "gen": self.gen.get_state(), "step": self.step,
        }

    def load(self, folder):
        newest = max(os.listdir(folder), key=lambda n: int(n.split("_")[1]))
        state = self.state()
        dcp.load(state, checkpoint_id=os.path.join(folder, newest))
        set_state_dict(self.online, self.optim, model_state_dict=state["online"], optim_state_dict=state["optim"])
        set_model_state_dict(self.target, state["target"])
        self.envs.state, self.replay.data = state["envs"], state["replay"]
        self.gen.set_state(state["gen"])
        self.step = state["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=60)
    ap.add_argument("--envs", type=int, default=16)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--capacity", type=int, default=600)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    agent = Agent(args)
    if args.resume:
        agent.load(args.resume)
    else:
        for _ in range(8):
            agent.act(1.0)
    while agent.step < args.steps:
        reward = agent.act(max(0.1, 1 - agent.step / 40))
        loss = agent.learn()
        agent.step += 1
        if agent.rank == 0 and agent.step % 10 == 0:
            print(f"step {agent.step} loss {loss:.4f} reward {reward:+.3f}", flush=True)
        if args.save_every and agent.step % args.save_every == 0:
            dcp.save(agent.state(), checkpoint_id=os.path.join(args.out, f"step_{agent.step}"))
    if args.export:
        full = {k: v.full_tensor() for net, sd in (("online", agent.online), ("target", agent.target)) for k, v in ((f"{net}.{n}", p.detach()) for n, p in sd.named_parameters())}
        if agent.rank == 0:
            torch.save({"weights": full, "replay": agent.replay.data}, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
