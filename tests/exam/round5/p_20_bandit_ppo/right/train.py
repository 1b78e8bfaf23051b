"""PPO on a contextual bandit: policy and value net in one optimizer, rollouts with Gumbel noise that is numbered by
(round, context), advantages whitened over the whole round, several passes over each rollout."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

D, ARMS = 6, 5


class ActorCritic(nn.Module):
    def __init__(self, h=24):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(D, h), nn.Tanh(), nn.Linear(h, h), nn.Tanh(), nn.Linear(h, ARMS))
        self.value = nn.Sequential(nn.Linear(D, h), nn.Tanh(), nn.Linear(h, 1))

    def forward(self, x):
        return self.actor(x).log_softmax(-1), self.value(x).squeeze(-1)


class Bandit:
    def __init__(self, seed=1):
        self.w = torch.randn(D, ARMS, generator=torch.Generator().manual_seed(seed))

    def round(self, number, n):
        g = torch.Generator().manual_seed(7001 + number)
        x = torch.randn(n, D, generator=g)
        gumbel = -(-torch.rand(n, ARMS, generator=g).clamp_min(1e-9).log()).log()
        reward = x @ self.w + 0.3 * torch.randn(n, ARMS, generator=g)
        return x, gumbel, reward


def whiten(adv):
    s = torch.stack([adv.sum(), adv.square().sum(), torch.tensor(float(len(adv)))])
    dist.all_reduce(s)
    mean = s[0] / s[2]
    return (adv - mean) / (s[1] / s[2] - mean.square()).sqrt().clamp_min(1e-6)


@torch.no_grad()
def rollout(model, bandit, number, n, rank, world):
    x, gumbel, reward = (t.chunk(world)[rank] for t in bandit.round(number, n))
    logp, value = model(x)
    act = (logp + gumbel).argmax(-1, keepdim=True)
    r = reward.gather(1, act).squeeze(1)
    return x, act, logp.gather(1, act).squeeze(1), r, whiten(r - value)


def ppo_loss(model, x, act, old, r, adv, clip=0.2):
    logp, value = model(x)
    ratio = (logp.gather(1, act).squeeze(1) - old).exp()
    pg = -torch.minimum(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv).mean()
    entropy = -(logp.exp() * logp).sum(-1).mean()
    return pg + 0.5 * (value - r).square().mean() - 0.01 * entropy


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rounds", type=int, default=12)
    ap.add_argument("--passes", type=int, default=3, help="optimizer steps on each rollout")
    ap.add_argument("--contexts", type=int, default=128)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--save-every", type=int, default=0, help="in rounds")
    ap.add_argument("--out", default="ppo")
    ap.add_argument("--resume", default=None)
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(10)
    model = ActorCritic()
    fully_shard(model.actor)
    fully_shard(model.value)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=a.lr, eps=1e-5)
    bandit, first = Bandit(), 0
    if a.resume:
        first = max(int(d[5:]) for d in os.listdir(a.resume) if d.startswith("round"))
        m, o = get_state_dict(model, opt)
        sd = {"m": m, "o": o}
        dcp.load(sd, checkpoint_id=os.path.join(a.resume, f"round{first}"))
        set_state_dict(model, opt, model_state_dict=sd["m"], optim_state_dict=sd["o"])
    for number in range(first, a.rounds):
        data = rollout(model, bandit, number, a.contexts, rank, world)
        for _ in range(a.passes):
            loss = ppo_loss(model, *data)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
        s = torch.stack([loss.detach(), data[3].mean()])
        dist.all_reduce(s)
        if rank == 0:
            print(f"round {number + 1} step {(number + 1) * a.passes} loss {s[0].item() / world:.4f} reward {s[1].item() / world:.3f}", flush=True)
        if a.save_every and (number + 1) % a.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"m": m, "o": o}, checkpoint_id=os.path.join(a.out, f"round{number + 1}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
