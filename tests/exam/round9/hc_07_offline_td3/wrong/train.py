"""TD3+BC on logged data; all four networks are sharded."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.fsdp import fully_shard

from nets import Actor, Critic
from polyak import Polyak
from replay import ACT, OBS, OfflineDataset


class Agent:
    def __init__(self, gamma=0.95, tau=0.05, bc=2.5, delay=2):
        self.gamma, self.bc, self.delay = gamma, bc, delay
        self.nets = {"actor": Actor(OBS, ACT), "critic": Critic(OBS, ACT),
                     "target_actor": Actor(OBS, ACT), "target_critic": Critic(OBS, ACT)}
        for name in ("actor", "critic"):
            self.nets["target_" + name].load_state_dict(self.nets[name].state_dict())
            self.nets["target_" + name].requires_grad_(False)
        self.polyak = [Polyak(self.nets[n], self.nets["target_" + n], tau) for n in ("actor", "critic")]
        for net in self.nets.values():
            fully_shard(net, reshard_after_forward=True)
        self.opts = {n: torch.optim.Adam(self.nets[n].parameters(), lr=3e-3) for n in ("actor", "critic")}

    def critic_loss(self, o, a, r, o2, noise):
        with torch.no_grad():
            a2 = (self.nets["target_actor"](o2) + (0.2 * noise).clamp(-0.5, 0.5)).clamp(-1, 1)
            target = r + self.gamma * torch.minimum(*self.nets["target_critic"](o2, a2))
        q1, q2 = self.nets["critic"](o, a)
        return (q1 - target).square().mean() + (q2 - target).square().mean()

    def actor_loss(self, o, a):
        pi = self.nets["actor"](o)
        q, _ = self.nets["critic"](o, pi)
        scale = q.detach().abs().sum()
        count = torch.tensor(float(len(q)))
        dist.all_reduce(scale)
        dist.all_reduce(count)
        return -(self.bc / (scale / count)) * q.mean() + (pi - a).square().mean()

    def update(self, step, batch):
        o, a, r, o2, noise = batch
        loss = self.critic_loss(o, a, r, o2, noise)
        self.opts["critic"].zero_grad()
        loss.backward()
        self.opts["critic"].step()
        if step % self.delay == 0:
            actor = self.actor_loss(o, a)
            self.opts["actor"].zero_grad()
            actor.backward()
            self.opts["actor"].step()
            for p in self.polyak:
                p.step()
        return loss.detach()

    def state(self):
        s = {n: get_model_state_dict(net) for n, net in self.nets.items()}
        s.update({"opt_" + n: get_optimizer_state_dict(self.nets[n], o) for n, o in self.opts.items()})
        return s

    def load(self, s):
        for n, net in self.nets.items():
            set_model_state_dict(net, s[n])
        for n, o in self.opts.items():
            set_optimizer_state_dict(self.nets[n], o, s["opt_" + n])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=80)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=30)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    agent = Agent()
    data = OfflineDataset()

    done = 0
    if args.resume:
        state = {"agent": agent.state(), "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        agent.load(state["agent"])
        done = state["step"]

    for step in range(done + 1, args.steps + 1):
        loss = agent.update(step, data.sample(step, args.batch, rank, world)) / world
        dist.all_reduce(loss)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} critic loss {loss:.6f}", flush=True)
        if args.out and step % args.save_every == 0:
            dcp.save({"agent": agent.state(), "step": step}, checkpoint_id=f"{args.out}/{step:06d}")

    with torch.no_grad():
        o = data.obs[:512].chunk(world)[rank]
        value = agent.nets["critic"](o, agent.nets["actor"](o))[0].sum() / 512
    dist.all_reduce(value)
    if rank == 0:
        print(f"estimated value {value:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
