"""A2C with continuous actions; actor and critic are two sharded models with an optimizer each."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from env import PointMass
from normalize import RunningMeanStd

OBS, ACT, STD = 5, 2, 0.5


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, o))


class Agent:
    def __init__(self, lr):
        torch.manual_seed(11)
        self.actor, self.critic = mlp(OBS, ACT), mlp(OBS, 1)
        for net in (self.actor, self.critic):
            for layer in net:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer)
            fully_shard(net)
        self.opt_a = torch.optim.Adam(self.actor.parameters(), lr=lr)
        self.opt_c = torch.optim.Adam(self.critic.parameters(), lr=3 * lr)
        self.norm = RunningMeanStd(OBS)

    def rollout(self, env, length, gamma=0.95):
        obs, acts, rews = [], [], []
        o = env.reset()
        with torch.no_grad():
            for _ in range(length):
                self.norm.update(o)
                x = self.norm(o)
                a = self.actor(x) + STD * env.noise()
                o, r = env.step(a)
                obs.append(x), acts.append(a), rews.append(r)
            ret = self.critic(self.norm(o)).squeeze(-1)
            rets = []
            for r in reversed(rews):
                ret = r + gamma * ret
                rets.append(ret)
        return torch.cat(obs), torch.cat(acts), torch.cat(rets[::-1]), torch.stack(rews).mean()

    def learn(self, obs, acts, rets):
        value = self.critic(obs).squeeze(-1)
        adv = rets - value.detach()
        stats = torch.stack([adv.sum(), adv.pow(2).sum(), torch.tensor(float(adv.numel()))])
        dist.all_reduce(stats)
        mean = stats[0] / stats[2]
        std = (stats[1] / stats[2] - mean ** 2).clamp_min(1e-8).sqrt()
        logp = -((acts - self.actor(obs)) ** 2).sum(1) / (2 * STD ** 2)
        loss_a = -(logp * (adv - mean) / std).mean()
        loss_c = (value - rets).pow(2).mean()
        (loss_a + loss_c).backward()
        self.opt_a.step(), self.opt_c.step()
        self.opt_a.zero_grad(), self.opt_c.zero_grad()
        return loss_c.detach()

    def state(self, env, it):
        ma, oa = get_state_dict(self.actor, self.opt_a)
        mc, oc = get_state_dict(self.critic, self.opt_c)
        return {"actor": ma, "critic": mc, "opt_a": oa, "opt_c": oc, "norm": self.norm.state_dict(),
                "env_rng": env.gen.get_state(), "it": it}

    def load(self, path, env):
        st = self.state(env, 0)
        dcp.load(st, checkpoint_id=path)
        set_state_dict(self.actor, self.opt_a, model_state_dict=st["actor"], optim_state_dict=st["opt_a"])
        set_state_dict(self.critic, self.opt_c, model_state_dict=st["critic"], optim_state_dict=st["opt_c"])
        self.norm.load_state_dict(st["norm"])
        env.gen.set_state(st["env_rng"])
        return st["it"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iters", type=int, default=24)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    env = PointMass(16, rank, world)
    agent = Agent(3e-3)
    start = 0
    if args.resume:
        last = max(os.listdir(args.resume), key=lambda n: int(n.removeprefix("it")))
        start = agent.load(os.path.join(args.resume, last), env)
    for it in range(start, args.iters):
        obs, acts, rets, rew = agent.rollout(env, 12)
        vloss = agent.learn(obs, acts, rets)
        log = torch.stack([rew, vloss]) / world
        dist.all_reduce(log)
        if rank == 0 and it % 4 == 3:
            print(f"iter {it + 1} reward {log[0]:.4f} value loss {log[1]:.5f}", flush=True)
        if args.save_every and (it + 1) % args.save_every == 0:
            dcp.save(agent.state(env, it + 1), checkpoint_id=os.path.join(args.out, f"it{it + 1}"))
    if args.export:
        opts = StateDictOptions(full_state_dict=True, cpu_offload=True)
        out = {"actor": get_model_state_dict(agent.actor, options=opts), "critic": get_model_state_dict(agent.critic, options=opts),
               "norm": agent.norm.state_dict()}
        if rank == 0:
            torch.save(out, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
