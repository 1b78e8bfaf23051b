"""PPO: sharded actor and critic, rollouts in the middle of training, advantages normalised over all ranks."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from env import Walk


class ActorCritic(nn.Module):
    def __init__(self, obs=18, width=32, actions=3):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.pi, self.v = nn.Linear(width, actions), nn.Linear(width, 1)

    def forward(self, x):
        h = self.body(x)
        return self.pi(h).log_softmax(-1), self.v(h).sum(-1)


class GlobalStats:
    """Running mean and variance of the returns over everything seen on all ranks (Chan's update)."""

    def __init__(self):
        self.data = torch.tensor([0.0, 1.0, 1e-4], dtype=torch.float64)

    def moments(self, x):
        s = torch.stack([x.double().sum(), x.double().pow(2).sum(), torch.tensor(float(x.numel()), dtype=torch.float64)])
        dist.all_reduce(s)
        mean = s[0] / s[2]
        return mean, (s[1] / s[2] - mean**2).clamp_min(0), s[2]

    def update(self, x):
        mean, var, n = self.moments(x)
        m0, v0, n0 = self.data
        d, tot = mean - m0, n0 + n
        self.data = torch.stack([m0 + d * n / tot, (v0 * n0 + var * n + d**2 * n0 * n / tot) / tot, tot])

    def normalise(self, x):
        return ((x - self.data[0]) / (self.data[1] + 1e-6).sqrt()).float()


def discounted(rew, gamma=0.9):
    out, acc = torch.empty_like(rew), torch.zeros(rew.shape[1])
    for t in reversed(range(len(rew))):
        acc = rew[t] + gamma * acc
        out[t] = acc
    return out


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iterations", type=int, default=8)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--envs", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(12)
    model = ActorCritic()
    fully_shard(model.body)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3, eps=1e-5)
    env, stats, it = Walk(), GlobalStats(), 0
    share = args.envs // world
    lo, hi = rank * share, (rank + 1) * share

    def state():
        m, o = get_state_dict(model, opt)
        return {"model": m, "opt": o, "returns": stats.data, "it": it}

    if args.resume:
        newest = max(os.listdir(args.resume), key=lambda d: int(d.split("-")[-1]))
        st = state()
        dcp.load(st, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(model, opt, model_state_dict=st["model"], optim_state_dict=st["opt"])
        stats.data, it = st["returns"], st["it"]

    while it < args.iterations:
        with torch.no_grad():
            obs, act, rew, old_logp = env.rollout(lambda o: model(o)[0], 700 + it, args.envs, lo, hi)
            ret = discounted(rew)
            stats.update(ret)
            target = stats.normalise(ret)
            adv = target - model(obs)[1]
            mean, var, _ = stats.moments(adv)
            adv = ((adv - mean) / (var.sqrt() + 1e-6)).float()

        for _ in range(args.epochs):
            lp_all, value = model(obs)
            ratio = (lp_all.gather(-1, act[..., None])[..., 0] - old_logp).exp()
            policy = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
            entropy = -(lp_all.exp() * lp_all).sum(-1).mean()
            loss = policy + 0.5 * (value - target).pow(2).mean() - 0.01 * entropy
            opt.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
        it += 1

        log = torch.stack([rew.mean(), loss.detach()]) / world
        dist.all_reduce(log)
        if rank == 0:
            print(f"iteration {it} reward {log[0]:.4f} loss {log[1]:.4f}")
        if args.save_every and it % args.save_every == 0:
            dcp.save(state(), checkpoint_id=os.path.join(args.out, f"iter-{it}"))

    if args.export:
        full = {k: v.full_tensor() for k, v in model.state_dict().items()}
        full["returns"] = stats.data
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
