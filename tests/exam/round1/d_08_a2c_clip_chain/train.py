"""Advantage actor-critic on a vectorised toy environment; actor and critic are two FSDP modules, one optimizer."""

import argparse
import itertools

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

STATE, ACTIONS, HORIZON = 6, 4, 8


def mlp(outputs, width=32):
    net = nn.Sequential(
        nn.Linear(STATE, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs)
    )
    fully_shard([net[0], net[2]])
    return fully_shard(net)


class Envs:
    """Each environment drifts at random; the action whose hidden direction fits the state best is paid."""

    def __init__(self, iteration, ids):
        self.noise = torch.stack([torch.randn(HORIZON + 1, STATE, generator=self._gen(iteration, i)) for i in ids])
        self.dirs = torch.randn(ACTIONS, STATE, generator=torch.Generator().manual_seed(99))
        self.t, self.s = 0, self.noise[:, 0]

    @staticmethod
    def _gen(iteration, env):
        return torch.Generator().manual_seed(iteration * 4096 + env)

    def step(self, action):
        fit = self.s @ self.dirs.T
        reward = fit.gather(1, action[:, None]).squeeze(1)
        self.t += 1
        self.s = 0.7 * self.s + 0.7 * self.noise[:, self.t]
        return self.s, reward


def rollout(actor, iteration, ids):
    env = Envs(iteration, ids)
    u = torch.stack(
        [torch.rand(HORIZON, ACTIONS, generator=torch.Generator().manual_seed(7 + iteration * 8192 + i)) for i in ids]
    )
    gumbel = -(-u.clamp_min(1e-9).log()).log()
    states, actions, rewards = [], [], []
    s = env.s
    with torch.no_grad():
        for t in range(HORIZON):
            a = (actor(s) + gumbel[:, t]).argmax(-1)
            states.append(s)
            actions.append(a)
            s, r = env.step(a)
            rewards.append(r)
    return torch.stack(states, 1), torch.stack(actions, 1), torch.stack(rewards, 1), s


def returns(rewards, last_value, gamma):
    out, running = [], last_value
    for t in reversed(range(rewards.shape[1])):
        running = rewards[:, t] + gamma * running
        out.append(running)
    return torch.stack(out[::-1], 1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--envs", type=int, default=16)
    ap.add_argument("--gamma", type=float, default=0.8)
    ap.add_argument("--lr", type=float, default=0.02)
    ap.add_argument("--max-norm", type=float, default=1.0)
    ap.add_argument("--entropy", type=float, default=0.01)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    actor, critic = mlp(ACTIONS), mlp(1)
    params = list(itertools.chain(actor.parameters(), critic.parameters()))
    optim = torch.optim.SGD(params, lr=args.lr, momentum=0.9)

    mine = range(rank, args.envs, world)
    for it in range(args.steps):
        states, actions, rewards, last = rollout(actor, it, mine)
        with torch.no_grad():
            target = returns(rewards, critic(last).squeeze(-1), args.gamma)
        logp = actor(states).log_softmax(-1)
        value = critic(states).squeeze(-1)
        advantage = (target - value).detach()
        chosen = logp.gather(-1, actions[..., None]).squeeze(-1)
        entropy = -(logp.exp() * logp).sum(-1).mean()
        policy_loss = -(chosen * advantage).mean()
        value_loss = F.mse_loss(value, target)
        loss = policy_loss + 0.5 * value_loss - args.entropy * entropy

        optim.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(params, args.max_norm)
        optim.step()

        log = torch.stack([loss.detach(), value_loss.detach(), rewards.mean()])
        dist.all_reduce(log)
        log /= world
        if rank == 0:
            print(f"iter {it:3d} loss {log[0]:.3f} value loss {log[1]:.3f} mean reward {log[2]:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
