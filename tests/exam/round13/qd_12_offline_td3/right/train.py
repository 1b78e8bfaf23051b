"""TD3+BC on logged data: four sharded networks, the policy is updated every second step."""
import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict

from dataset import LoggedTransitions
from nets import Actor, TwinCritic, polyak, sharded

GAMMA, TAU, ALPHA, POLICY_DELAY = 0.95, 0.05, 2.5, 2


class TD3:
    def __init__(self, width=32, lr=3e-3):
        self.actor, self.critic = Actor(4, 2, width), TwinCritic(4, 2, width)
        self.actor_t, self.critic_t = copy.deepcopy(self.actor), copy.deepcopy(self.critic)
        for net in (self.actor, self.critic, self.actor_t, self.critic_t):
            sharded(net)
        self.actor_t.requires_grad_(False)
        self.critic_t.requires_grad_(False)
        self.opt_a = torch.optim.Adam(self.actor.parameters(), lr=lr)
        self.opt_c = torch.optim.Adam(self.critic.parameters(), lr=lr)
        self.step = 0

    def update(self, obs, act, rew, nxt, noise):
        with torch.no_grad():
            na = (self.actor_t(nxt) + noise).clamp(-1, 1)
            goal = rew + GAMMA * self.critic_t(nxt, na).amin(-1)
        td = F.mse_loss(self.critic(obs, act), goal[:, None].expand(-1, 2))
        self.opt_c.zero_grad()
        td.backward()
        self.opt_c.step()
        if self.step % POLICY_DELAY == 0:
            self.critic.requires_grad_(False)
            pi = self.actor(obs)
            q = self.critic(obs, pi)[:, 0]
            size = q.detach().abs().mean()
            dist.all_reduce(size)
            size /= dist.get_world_size()
            policy = -ALPHA * (q / size).mean() + F.mse_loss(pi, act)
            self.opt_a.zero_grad()
            policy.backward()
            self.opt_a.step()
            self.critic.requires_grad_(True)
            polyak(self.actor_t, self.actor, TAU)
            polyak(self.critic_t, self.critic, TAU)
        self.step += 1
        return td.detach()

    def state(self):
        a, ao = get_state_dict(self.actor, self.opt_a)
        c, co = get_state_dict(self.critic, self.opt_c)
        return {"actor": a, "actor_opt": ao, "critic": c, "critic_opt": co, "actor_t": get_model_state_dict(self.actor_t),
                "critic_t": get_model_state_dict(self.critic_t), "step": torch.tensor(self.step)}

    def load(self, path):
        s = self.state()
        dcp.load(s, checkpoint_id=path)
        set_state_dict(self.actor, self.opt_a, model_state_dict=s["actor"], optim_state_dict=s["actor_opt"])
        set_state_dict(self.critic, self.opt_c, model_state_dict=s["critic"], optim_state_dict=s["critic_opt"])
        set_model_state_dict(self.actor_t, s["actor_t"])
        set_model_state_dict(self.critic_t, s["critic_t"])
        self.step = int(s["step"])


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=15)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="td3")
    p.add_argument("--resume")
    a = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(23)
    agent, data = TD3(), LoggedTransitions(256, seed=5)
    if a.resume:
        agent.load(os.path.join(a.resume, max(os.listdir(a.resume))))
    while agent.step < a.steps:
        td = agent.update(*(t[rank::world] for t in data.sample(agent.step, a.batch))) / world
        dist.all_reduce(td)
        if rank == 0 and agent.step % 3 == 1:
            print(f"update {agent.step} td error {td.item():.5f}", flush=True)
        if a.save_every and agent.step % a.save_every == 0:
            dcp.save(agent.state(), checkpoint_id=os.path.join(a.out, f"u{agent.step:05d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
