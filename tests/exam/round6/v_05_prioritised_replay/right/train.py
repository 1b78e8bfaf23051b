"""Double DQN with prioritised replay; online and target network are both sharded."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

from replay import PrioritisedReplay
from world import Corridors


def make_q():
    net = nn.Sequential(nn.Linear(4, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 3))
    for layer in (net[0], net[2]):
        fully_shard(layer)
    return fully_shard(net, reshard_after_forward=True)


class Agent:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(4)
        self.online = make_q()
        torch.manual_seed(4)
        self.target = make_q().requires_grad_(False)
        self.opt = torch.optim.Adam(self.online.parameters(), lr=3e-3)
        self.envs = Corridors(16, seed=8)
        self.memory = PrioritisedReplay(512, 4)
        self.gen = torch.Generator().manual_seed(99)
        self.step = 0
        if not args.resume:
            for _ in range(12):
                self.memory.add(*self.envs.step(torch.randint(3, (16,), generator=self.gen)))

    def learn(self):
        idx, weight = self.memory.draw(self.args.batch, beta=0.5)
        local = self.args.batch // self.world
        mine = slice(self.rank * local, (self.rank + 1) * local)
        idx, weight = idx[mine], weight[mine]
        m = self.memory
        with torch.no_grad():
            best = self.online(m.next_obs[idx]).argmax(1, keepdim=True)
            future = self.target(m.next_obs[idx]).gather(1, best).squeeze(1)
            goal = m.reward[idx] + 0.5 * (1 - m.done[idx]) * future
        q = self.online(m.obs[idx]).gather(1, m.action[idx, None]).squeeze(1)
        td = goal - q
        loss = (weight * td.pow(2)).mean()
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.memory.update(idx, td.detach())
        if self.step % 5 == 4:
            with torch.no_grad():
                for t, o in zip(self.target.parameters(), self.online.parameters()):
                    t.copy_(o)
        return loss.detach() / self.world

    def collect(self):
        # fresh experience from a fixed random behaviour policy
        self.memory.add(*self.envs.step(torch.randint(3, (16,), generator=self.gen)))

    def state(self):
        model, opt = get_state_dict(self.online, self.opt)
        return {
            "online": model,
            "target": get_model_state_dict(self.target),
            "opt": opt,
            "memory": self.memory.state(),
            "envs": self.envs.state(),
            "gen": self.gen.get_state(),
            "step": self.step,
        }

    def load(self, path):
        state = self.state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(self.online, self.opt, model_state_dict=state["online"], optim_state_dict=state["opt"])
        set_model_state_dict(self.target, state["target"])
        self.memory.load(state["memory"])
        self.envs.load(state["envs"])
        self.gen.set_state(state["gen"])
        self.step = state["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="dqn")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    agent = Agent(args)
    if args.resume:
        agent.load(os.path.join(args.resume, sorted(os.listdir(args.resume))[-1]))
    while agent.step < args.steps:
        loss = agent.learn()
        agent.collect()
        agent.step += 1
        dist.all_reduce(loss)
        if agent.rank == 0:
            print(f"step {agent.step} loss {loss:.5f}", flush=True)
        if args.save_every and agent.step % args.save_every == 0:
            dcp.save(agent.state(), checkpoint_id=os.path.join(args.out, f"it{agent.step:06d}"))
    if args.export:
        full = get_model_state_dict(agent.online, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if agent.rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
