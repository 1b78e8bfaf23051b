"""Online soft actor-critic. Environments are divided over the ranks, the replay buffer is shared,
the temperature is an ordinary replicated scalar whose gradient is reduced by hand."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from nets import Actor, Critic
from replay import SharedReplay

OBS, ACT, ENVS, BATCH = 4, 2, 16, 64
GAMMA, TAU, TARGET_ENTROPY = 0.95, 0.02, -2.0


def env_step(obs, action):
    pos, vel = obs.chunk(2, -1)
    vel = 0.9 * vel + 0.3 * action
    pos = pos + 0.3 * vel
    reward = -(pos.square().sum(-1) + 0.1 * action.square().sum(-1))
    return torch.cat([pos, vel], -1).clamp(-4, 4), reward


class SAC:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(3)
        self.actor, self.critic, self.target = Actor(OBS, ACT), Critic(OBS, ACT), Critic(OBS, ACT)
        self.target.load_state_dict(self.critic.state_dict())
        self.target.requires_grad_(False)
        fully_shard(self.actor)
        for c in (self.critic, self.target):
            for head in c.heads:
                fully_shard(head)
            fully_shard(c)
        self.log_alpha = torch.tensor(-1.0, requires_grad=True)
        self.opt_actor = torch.optim.Adam(self.actor.parameters(), lr=2e-3)
        self.opt_critic = torch.optim.Adam(self.critic.parameters(), lr=3e-3)
        self.opt_alpha = torch.optim.Adam([self.log_alpha], lr=1e-2)
        self.random = torch.Generator().manual_seed(40)
        self.replay = SharedReplay(2048, 2 * OBS + ACT + 1)
        self.obs = self.slice(torch.randn(ENVS, OBS, generator=self.random))
        self.step = 0

    def slice(self, t):
        return t.chunk(self.world)[self.rank]

    def noise(self, n):
        return self.slice(torch.randn(n, ACT, generator=self.random))

    @torch.no_grad()
    def collect(self):
        action, _ = self.actor(self.obs, self.noise(ENVS))
        nxt, reward = env_step(self.obs, action)
        self.replay.add(torch.cat([self.obs, action, reward[:, None], nxt], -1))
        self.obs = nxt

    def learn(self):
        idx = self.slice(torch.randint(0, self.replay.size, (BATCH,), generator=self.random))
        o, a, r, o2 = self.replay.rows[idx].split([OBS, ACT, 1, OBS], -1)
        alpha = self.log_alpha.detach().exp()

        with torch.no_grad():
            a2, logp2 = self.actor(o2, self.noise(BATCH))
            goal = r.squeeze(-1) + GAMMA * (self.target(o2, a2).amin(0) - alpha * logp2)
        critic_loss = (self.critic(o, a) - goal).square().mean(1).sum()
        self.opt_critic.zero_grad()
        critic_loss.backward()
        self.opt_critic.step()

        pi, logp = self.actor(o, self.noise(BATCH))
        actor_loss = (alpha * logp - self.critic(o, pi).amin(0)).mean()
        self.opt_actor.zero_grad()
        actor_loss.backward()
        self.opt_actor.step()

        alpha_loss = -(self.log_alpha * (logp.detach() + TARGET_ENTROPY)).mean()
        self.opt_alpha.zero_grad()
        alpha_loss.backward()
        dist.all_reduce(self.log_alpha.grad)
        self.log_alpha.grad /= self.world
        self.opt_alpha.step()

        with torch.no_grad():
            for t, p in zip(self.target.parameters(), self.critic.parameters()):
                t.lerp_(p, TAU)
        return torch.stack([critic_loss.detach(), actor_loss.detach(), r.mean()])

    def state(self):
        parts = [torch.empty_like(self.obs) for _ in range(self.world)]
        dist.all_gather(parts, self.obs.contiguous())
        s = {"step": self.step, "random": self.random.get_state(), "obs": torch.cat(parts),
             "replay": self.replay.state_dict(), "log_alpha": self.log_alpha.detach(),
             "target": self.target.state_dict()}
        # a fresh optimizer gets its (zero) state here, so that loading finds the same keys
        if not self.opt_alpha.state:
            s["alpha_adam"] = {"step": torch.zeros(()), "exp_avg": torch.zeros(()), "exp_avg_sq": torch.zeros(())}
        else:
            s["alpha_adam"] = dict(self.opt_alpha.state[self.log_alpha])
        for name, net, opt in (("actor", self.actor, self.opt_actor), ("critic", self.critic, self.opt_critic)):
            s[name], s["opt_" + name] = get_state_dict(net, opt)
        return s

    def load(self, path):
        s = self.state()
        dcp.load(s, checkpoint_id=path)
        for name, net, opt in (("actor", self.actor, self.opt_actor), ("critic", self.critic, self.opt_critic)):
            set_state_dict(net, opt, model_state_dict=s[name], optim_state_dict=s["opt_" + name])
        self.target.load_state_dict(s["target"])
        self.opt_alpha.state[self.log_alpha] = s["alpha_adam"]
        self.log_alpha.data.copy_(s["log_alpha"])
        self.replay.load_state_dict(s["replay"])
        self.random.set_state(s["random"])
        self.obs = self.slice(s["obs"]).clone()
        self.step = s["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--warmup", type=int, default=4)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=15)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    agent = SAC()
    if args.resume:
        agent.load(os.path.join(args.resume, sorted(os.listdir(args.resume))[-1]))
    while agent.step < args.steps:
        agent.collect()
        agent.step += 1
        if agent.step > args.warmup:
            stats = agent.learn() / agent.world
            dist.all_reduce(stats)
            if agent.rank == 0 and agent.step % 4 == 0:
                print(f"step {agent.step} critic {stats[0]:.5f} actor {stats[1]:.5f} reward {stats[2]:.5f} "
                      f"alpha {agent.log_alpha.exp().item():.5f}", flush=True)
        if args.out and agent.step % args.save_every == 0:
            dcp.save(agent.state(), checkpoint_id=os.path.join(args.out, f"sac_{agent.step:05d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
