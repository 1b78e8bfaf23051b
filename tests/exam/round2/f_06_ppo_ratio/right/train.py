"""PPO on a batch of one-dimensional cart problems (rollout, GAE, clipped epochs), FSDP2 on CPU."""

import argparse
import glob
import math
import os
import re
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful


class ActorCritic(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.pi = nn.Linear(width, 3)
        self.v = nn.Linear(width, 1)

    def forward(self, obs):
        h = self.body(obs)
        return self.pi(h).log_softmax(-1), self.v(h).squeeze(-1)


def env_step(state, action):
    pos, vel = state.unbind(-1)
    vel = 0.9 * vel + 0.2 * (action.float() - 1)
    pos = (pos + vel).clamp(-3, 3)
    return torch.stack([pos, vel], -1), -(pos**2) * 0.3 - 0.05 * vel**2


@torch.no_grad()
def rollout(model, it, n_env, horizon, rank, world):
    g = torch.Generator().manual_seed(4000 + it)
    state = torch.rand(n_env, 2, generator=g) * 2 - 1
    gumbel = -torch.log(-torch.log(torch.rand(horizon, n_env, 3, generator=g) + 1e-9) + 1e-9)
    state, gumbel = state.chunk(world)[rank], gumbel.chunk(world, dim=1)[rank]
    obs, acts, logps, rews, vals = [], [], [], [], []
    for t in range(horizon):
        logp, v = model(state)
        a = (logp + gumbel[t]).argmax(-1)
        obs.append(state)
        acts.append(a)
        vals.append(v)
        logps.append(logp.gather(-1, a[:, None]).squeeze(-1))
        state, r = env_step(state, a)
        rews.append(r)
    vals.append(model(state)[1])
    adv, last = [], torch.zeros_like(rews[0])
    for t in reversed(range(horizon)):
        delta = rews[t] + 0.95 * vals[t + 1] - vals[t]
        last = delta + 0.95 * 0.9 * last
        adv.insert(0, last)
    adv = torch.stack(adv)
    ret = adv + torch.stack(vals[:-1])
    flat = lambda xs: torch.stack(xs).flatten(0, 1)
    return flat(obs), flat(acts), flat(logps), adv.flatten(), ret.flatten(), torch.stack(rews).mean()


def normalise(adv):
    s = torch.stack([adv.sum(), adv.square().sum(), torch.tensor(float(adv.numel()))])
    dist.all_reduce(s)
    mean = s[0] / s[2]
    return (adv - mean) / ((s[1] / s[2] - mean**2).clamp_min(0).sqrt() + 1e-6)


def export_weights(model, path):
    full = {
        k: (v.full_tensor() if isinstance(v, DTensor) else v).detach().cpu().clone()
        for k, v in model.state_dict().items()
    }
    if dist.get_rank() == 0:
        torch.save(full, path)


class AppState(Stateful):
    def __init__(self, models, opts, meta):
        self.models, self.opts, self.meta = models, opts, meta

    def state_dict(self):
        out = {"meta": dict(self.meta)}
        for name, model in self.models.items():
            msd, osd = get_state_dict(model, self.opts.get(name, []))
            out[name] = {"model": msd, "optim": osd}
        return out

    def load_state_dict(self, sd):
        self.meta.update(sd["meta"])
        for name, model in self.models.items():
            set_state_dict(
                model, self.opts.get(name, []), model_state_dict=sd[name]["model"], optim_state_dict=sd[name]["optim"]
            )


def newest_complete(folder):
    done = [d for d in glob.glob(os.path.join(folder, "step_*")) if os.path.exists(os.path.join(d, ".metadata"))]
    return sorted(done)[-1]


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--lr", type=float, default=0.01)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="ckpt")
    p.add_argument("--resume", default=None)
    p.add_argument("--export", default=None)
    return p.parse_args()


def main():
    args = get_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    epochs = 3
    torch.manual_seed(0)
    model = ActorCritic()
    fully_shard(model.body)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    meta = {"step": 0}
    app = AppState({"policy": model}, {"policy": opt}, meta)
    if args.resume:
        dcp.load({"app": app}, checkpoint_id=newest_complete(args.resume))
    # one "step" here is one optimizer step; a checkpoint is taken between two rollouts
    while meta["step"] < args.steps:
        it = meta["step"] // epochs
        obs, act, logp_old, adv, ret, rew = rollout(model, it, args.batch, 12, rank, world)
        adv = normalise(adv)
        for _ in range(epochs):
            logp_all, value = model(obs)
            logp = logp_all.gather(-1, act[:, None]).squeeze(-1)
            ratio = (logp - logp_old).exp()
            surrogate = torch.minimum(ratio * adv, ratio.clamp(0.9, 1.1) * adv)
            entropy = -(logp_all.exp() * logp_all).sum(-1).mean()
            loss = -surrogate.mean() + 0.5 * (value - ret).square().mean() - 0.01 * entropy
            opt.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            meta["step"] += 1
        both = torch.stack([rew, loss.detach()]) / world
        dist.all_reduce(both)
        if rank == 0:
            print(f"step {meta['step']} reward {both[0].item():.5f} loss {both[1].item():.5f}", flush=True)
        if args.save_every and meta["step"] % args.save_every == 0:
            dcp.save({"app": app}, checkpoint_id=os.path.join(args.out, f"step_{meta['step']:06d}"))
    if args.export:
        export_weights(model, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
