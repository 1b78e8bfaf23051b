"""Deterministic policy gradient for a continuous contextual control task (one-step returns)."""
import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from nets import Actor, Critic

OBS, ACT = 6, 2


class ControlTask:
    def __init__(self):
        g = torch.Generator().manual_seed(77)
        self.mix = torch.randn(OBS, ACT, generator=g) / OBS**0.5

    def best(self, obs):
        return torch.tanh(obs @ self.mix)

    def reward(self, obs, act):
        return -(act - self.best(obs)).pow(2).sum(1)


class Agent:
    def __init__(self, lr):
        torch.manual_seed(2)
        self.actor, self.critic = Actor(OBS, ACT), Critic(OBS, ACT)
        for net in (self.actor, self.critic):
            fully_shard(net)
        self.actor_opt = torch.optim.Adam(self.actor.parameters(), lr=lr)
        self.critic_opt = torch.optim.Adam(self.critic.parameters(), lr=2 * lr)

    def update_critic(self, obs, act, reward):
        loss = (self.critic(obs, act).squeeze(1) - reward).pow(2).mean()
        self.critic_opt.zero_grad()
        loss.backward()
        self.critic_opt.step()
        return loss.detach()

    def update_actor(self, obs):
        # the critic is only passed through here, no need to reduce its gradients
        self.critic.set_requires_gradient_sync(False)
        loss = -self.critic(obs, self.actor(obs)).mean()
        self.actor_opt.zero_grad()
        loss.backward()
        self.critic.set_requires_gradient_sync(True)
        self.actor_opt.step()
        return loss.detach()

    def state_dict(self):
        out = {}
        for name, net, opt in (
            ("actor", self.actor, self.actor_opt),
            ("critic", self.critic, self.critic_opt),
        ):
            out[name], out[name + "_opt"] = get_state_dict(net, opt)
        return out

    def load_state_dict(self, state):
        for name, net, opt in (
            ("actor", self.actor, self.actor_opt),
            ("critic", self.critic, self.critic_opt),
        ):
            set_state_dict(net, opt, model_state_dict=state[name], optim_state_dict=state[name + "_opt"])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=150)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", type=Path, default=Path("agent"))
    ap.add_argument("--resume", type=Path)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    task, agent = ControlTask(), Agent(args.lr)
    start = 0
    if args.resume:
        newest = max((int(p.name) for p in args.resume.iterdir()))
        state = {"agent": agent.state_dict()}
        dcp.load(state, checkpoint_id=args.resume / str(newest))
        agent.load_state_dict(state["agent"])
        start = newest

    for step in range(start, args.steps):
        g = torch.Generator().manual_seed(31_000 + step)
        obs = torch.randn(args.batch, OBS, generator=g).chunk(world)[rank]
        noise = torch.randn(args.batch, ACT, generator=g).chunk(world)[rank]
        with torch.no_grad():
            act = (agent.actor(obs) + 0.4 * noise).clamp(-1, 1)
        critic_loss = agent.update_critic(obs, act, task.reward(obs, act))
        agent.update_actor(obs)

        if (step + 1) % 25 == 0:
            with torch.no_grad():
                regret = -task.reward(obs, agent.actor(obs)).mean()
            shown = torch.stack([critic_loss, regret]) / world
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1} critic loss {shown[0]:.5f} regret {shown[1]:.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save({"agent": agent.state_dict()}, checkpoint_id=args.out / str(step + 1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
