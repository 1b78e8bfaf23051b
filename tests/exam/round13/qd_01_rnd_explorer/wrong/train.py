"""Exploration by random network distillation on a point-mass maze, actor-critic, FSDP2."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

OBS, ACTIONS, HORIZON = 6, 5, 5
MOVES = torch.tensor([[0.0, 0.0], [0.2, 0.0], [-0.2, 0.0], [0.0, 0.2], [0.0, -0.2]])


def mlp(sizes):
    layers = []
    for i, (a, b) in enumerate(zip(sizes[:-1], sizes[1:])):
        layers.append(nn.Linear(a, b))
        if i < len(sizes) - 2:
            layers.append(nn.Tanh())
    return nn.Sequential(*layers)


class Agent(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.trunk = mlp([OBS, width, width])
        self.pi = nn.Linear(width, ACTIONS)
        self.v = nn.Linear(width, 1)
        self.predictor = mlp([OBS, width, width, 8])

    def forward(self, obs):
        h = torch.tanh(self.trunk(obs))
        return self.pi(h), self.v(h).sum(-1), self.predictor(obs)


def observe(pos):
    return torch.cat([pos, torch.sin(3 * pos), torch.cos(3 * pos)], -1)


def rollout(agent, target, start, gumbel, noise):
    """All environments of this rank for HORIZON steps; intrinsic reward is the distillation error of the next state."""
    pos, seen, act_l = start, [observe(start)], []
    with torch.no_grad():
        for t in range(HORIZON):
            logits, _, _ = agent(seen[-1])
            act = (logits + gumbel[:, t]).argmax(-1)
            pos = (pos + MOVES[act] + 0.02 * noise[:, t]).clamp(-2, 2)
            seen.append(observe(pos))
            act_l.append(act)
        nxt = torch.stack(seen[1:], 1)
        err = (agent.predictor(nxt) - target(nxt)).pow(2).mean(-1)
    return torch.stack(seen[:-1], 1), torch.stack(act_l, 1), err


def returns_to_go(rew, gamma=0.9):
    out, acc = torch.zeros_like(rew), torch.zeros(rew.shape[0])
    for t in reversed(range(rew.shape[1])):
        acc = rew[:, t] + gamma * acc
        out[:, t] = acc
    return out


def global_moments(x):
    s = torch.stack([x.sum(), x.pow(2).sum(), torch.tensor(float(x.numel()))])
    dist.all_reduce(s)
    mean = s[0] / s[2]
    return mean, (s[1] / s[2] - mean**2).clamp_min(1e-8).sqrt()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=14)
    ap.add_argument("--envs", type=int, default=32)
    ap.add_argument("--width", type=int, default=32)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--seed", type=int, default=11)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + rank)

    agent = Agent(args.width)
    target = mlp([OBS, args.width, 8]).requires_grad_(False)  # small and frozen: kept whole on every rank
    fully_shard(agent.predictor)
    fully_shard(agent)
    opt = torch.optim.Adam(agent.parameters(), lr=args.lr)

    first = 0
    if args.resume:
        model_sd, opt_sd = get_state_dict(agent, opt)
        state = {"agent": model_sd, "opt": opt_sd, "rnd_target": target.state_dict(), "step": torch.tensor(0)}
        newest = max(d for d in os.listdir(args.resume) if d.startswith("step_"))
        dcp.load(state, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(agent, opt, model_state_dict=state["agent"], optim_state_dict=state["opt"])
        target.load_state_dict(state["rnd_target"])
        first = int(state["step"])

    for step in range(first, args.steps):
        g = torch.Generator().manual_seed(args.seed * 100003 + step)
        start = torch.randn(args.envs, 2, generator=g) * 0.3
        u = torch.rand(args.envs, HORIZON, ACTIONS, generator=g)
        noise = torch.randn(args.envs, HORIZON, 2, generator=g)
        mine = slice(rank * args.envs // world, (rank + 1) * args.envs // world)
        gumbel = -torch.log(-torch.log(u.clamp(1e-6, 1 - 1e-6)))
        obs, act, err = rollout(agent, target, start[mine], gumbel[mine], noise[mine])

        _, scale = global_moments(err)
        ret = returns_to_go(err / scale)
        flat = obs.reshape(-1, OBS)
        logits, value, pred = agent(flat)
        adv = ret.reshape(-1) - value.detach()
        mean, std = global_moments(adv)
        logp = F.log_softmax(logits, -1)
        pg = -(logp.gather(-1, act.reshape(-1, 1)).squeeze(-1) * (adv - mean) / std).mean()
        entropy = -(logp.exp() * logp).sum(-1).mean()
        distill = F.mse_loss(pred, target(flat))
        loss = pg + 0.1 * F.mse_loss(value, ret.reshape(-1)) + 5.0 * distill - 0.01 * entropy
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()

        if step % 4 == 3 or step == 0:
            d = distill.detach().clone()
            dist.all_reduce(d)
            if rank == 0:
                print(f"step {step + 1} distill {d.item() / world:.5f} bonus_scale {scale.item():.5f}", flush=True)
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            model_sd, opt_sd = get_state_dict(agent, opt)
            dcp.save({"agent": model_sd, "opt": opt_sd, "rnd_target": target.state_dict(), "step": torch.tensor(step + 1)},
                     checkpoint_id=os.path.join(args.out, f"step_{step + 1:05d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
