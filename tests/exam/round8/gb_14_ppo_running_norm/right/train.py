import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributions import Normal

from agent import Agent, RunningNorm
from env import CartField

N_ENV, HORIZON, EPOCHS, MINIBATCHES = 16, 12, 2, 3
GAMMA, LAM, CLIP = 0.97, 0.95, 0.2


def global_moments(x):
    s = torch.stack([torch.tensor(float(x.numel()), dtype=torch.float64), x.double().sum(), x.double().square().sum()])
    dist.all_reduce(s)
    mean = s[1] / s[0]
    return mean.float(), (s[2] / s[0] - mean ** 2).clamp(min=0).sqrt().float()


class PPO:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(2)
        self.agent = Agent()
        fully_shard(self.agent.policy)
        fully_shard(self.agent.value)
        fully_shard(self.agent)
        self.norm = RunningNorm(4)
        self.opt = torch.optim.Adam(self.agent.parameters(), lr=3e-3, eps=1e-5)
        self.mine = slice(self.rank * N_ENV // self.world, (self.rank + 1) * N_ENV // self.world)
        self.iteration = 0

    def rollout(self):
        # all environments are made from the iteration's seed, each rank runs its own part
        env = CartField(N_ENV, seed=7000 + self.iteration)
        env.pos, env.vel = env.pos[self.mine], env.vel[self.mine]
        g = torch.Generator().manual_seed(8000 + self.iteration)
        rows = []
        with torch.no_grad():
            for _ in range(HORIZON):
                raw = env.observe()
                if self.norm.count == 0:
                    self.norm.update(raw)
                obs = self.norm(raw)
                mean, std, v = self.agent(obs)
                pi = Normal(mean, std)
                a = pi.mean + pi.stddev * torch.randn(N_ENV, 2, generator=g)[self.mine]
                r = env.act(a)
                rows.append((raw, obs, a, pi.log_prob(a).sum(-1), v, r))
            last = self.agent(self.norm(env.observe()))[2]
        raw, obs, act, logp, val, rew = (torch.stack(c) for c in zip(*rows))
        adv, run = torch.zeros_like(rew), torch.zeros_like(last)
        for t in reversed(range(HORIZON)):
            nxt = last if t == HORIZON - 1 else val[t + 1]
            run = rew[t] + GAMMA * nxt - val[t] + GAMMA * LAM * run
            adv[t] = run
        self.norm.update(raw.flatten(0, 1))
        return dict(obs=obs, act=act, logp=logp, ret=adv + val, adv=adv), rew

    def update(self, data):
        mean, std = global_moments(data["adv"])
        data["adv"] = (data["adv"] - mean) / (std + 1e-6)
        g = torch.Generator().manual_seed(9000 + self.iteration)
        for _ in range(EPOCHS):
            # minibatches are sets of time steps, so that every rank has its environments' share of each
            for steps in torch.randperm(HORIZON, generator=g).chunk(MINIBATCHES):
                b = {k: v[steps].flatten(0, 1) for k, v in data.items()}
                mean, std, v = self.agent(b["obs"])
                pi = Normal(mean, std)
                ratio = (pi.log_prob(b["act"]).sum(-1) - b["logp"]).exp()
                gain = torch.min(ratio * b["adv"], ratio.clamp(1 - CLIP, 1 + CLIP) * b["adv"]).mean()
                loss = -gain + 0.5 * (v - b["ret"]).square().mean() - 0.003 * pi.entropy().sum(-1).mean()
                loss.backward()
                nn.utils.clip_grad_norm_(self.agent.parameters(), 0.5)
                self.opt.step()
                self.opt.zero_grad()

    def state(self):
        m, o = get_state_dict(self.agent, self.opt)
        return {"agent": m, "opt": o, "norm": self.norm.state_dict(), "iteration": self.iteration}

    def save(self):
        dcp.save(self.state(), checkpoint_id=os.path.join(self.args.out, f"iter_{self.iteration:04d}"))

    def load(self, root):
        s = self.state()
        dcp.load(s, checkpoint_id=os.path.join(root, max(os.listdir(root))))
        set_state_dict(self.agent, self.opt, model_state_dict=s["agent"], optim_state_dict=s["opt"])
        self.norm.load_state_dict(s["norm"])
        self.iteration = s["iteration"]

    def run(self):
        while self.iteration < self.args.iterations:
            data, rew = self.rollout()
            self.update(data)
            self.iteration += 1
            reward, _ = global_moments(rew)
            if self.rank == 0:
                print(f"iteration {self.iteration} reward {reward.item():.6f}", flush=True)
            if self.args.save_every and self.iteration % self.args.save_every == 0:
                self.save()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--iterations", type=int, default=8, help="each has EPOCHS * MINIBATCHES optimizer steps")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ppo")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    ppo = PPO(args)
    if args.resume:
        ppo.load(args.resume)
    ppo.run()
    dist.destroy_process_group()
