"""REINFORCE fine-tuning of a tiny autoregressive 'image' policy towards a reward, written as a pipeline of generators.

rollouts -> advantages (normalised over the whole global batch) -> updates; a frozen reference gives the KL penalty."""
import argparse
import itertools
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

LENGTH, TONES = 8, 5


class Mix(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.conv = nn.Conv1d(d, d, 4)
        self.out = nn.Linear(d, d)

    def forward(self, x):
        h = F.pad(self.norm(x).transpose(1, 2), (3, 0))
        return x + self.out(F.silu(self.conv(h)).transpose(1, 2))


class Policy(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.tok = nn.Embedding(TONES + 1, d)
        self.layers = nn.ModuleList(Mix(d) for _ in range(2))
        self.out = nn.Linear(d, TONES)

    def forward(self, seq):
        """Log-probabilities of the tone at each place, given the tones before it."""
        h = self.tok(F.pad(seq[:, :-1], (1, 0), value=TONES))
        for layer in self.layers:
            h = layer(h)
        return self.out(h).log_softmax(-1)


def build():
    torch.manual_seed(0)
    net = Policy()
    for layer in net.layers:
        fully_shard(layer)
    return fully_shard(net)


def reward(seq):
    """Rising pictures without repeats are nice."""
    step = seq[:, 1:] - seq[:, :-1]
    return (step == 1).float().sum(1) - 0.5 * (step == 0).float().sum(1)


@dataclass
class Rollout:
    step: int
    seq: torch.Tensor
    reward: torch.Tensor
    ref: torch.Tensor
    adv: torch.Tensor = None


@torch.no_grad()
def rollouts(policy, reference, steps, batch, rank, world):
    mine = slice(rank * batch // world, (rank + 1) * batch // world)
    for step in steps:
        u = torch.rand(LENGTH, batch, generator=torch.Generator().manual_seed(4242 + step))[:, mine]
        seq = torch.zeros(u.size(1), LENGTH, dtype=torch.long)
        for i in range(LENGTH):
            p = policy(seq)[:, i].double().exp()
            seq[:, i] = (p.cumsum(-1) < u[i, :, None]).sum(-1).clamp(max=TONES - 1)
        ref = reference(seq).gather(-1, seq[..., None])[..., 0]
        yield Rollout(step, seq, reward(seq), ref)


def with_advantages(source):
    for r in source:
        m = torch.stack([r.reward.sum(), r.reward.square().sum(), torch.tensor(float(len(r.reward)))])
        dist.all_reduce(m)
        mean = m[0] / m[2]
        r.adv = (r.reward - mean) / (m[1] / m[2] - mean**2).clamp_min(1e-4).sqrt()
        yield r, mean.item()


def updates(policy, opt, source, kl_weight, clip):
    for r, mean_reward in source:
        lp = policy(r.seq).gather(-1, r.seq[..., None])[..., 0]
        log_ratio = r.ref - lp
        kl = (log_ratio.exp() - 1 - log_ratio).mean()
        loss = -(r.adv[:, None] * lp).mean() + kl_weight * kl
        opt.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(policy.parameters(), clip)
        opt.step()
        yield r.step + 1, mean_reward, norm


def checkpoints(policy, opt, source, every, folder):
    for item in source:
        if every and item[0] % every == 0:
            m, o = get_state_dict(policy, opt)
            dcp.save({"policy": m, "opt": o}, checkpoint_id=os.path.join(folder, f"{item[0]:05d}"))
        yield item


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    policy, reference = build(), build()
    reference.requires_grad_(False)
    opt = torch.optim.SGD(policy.parameters(), lr=0.3, momentum=0.8)
    start = 0
    if a.resume:
        name = max(os.listdir(a.resume))
        m, o = get_state_dict(policy, opt)
        state = {"policy": m, "opt": o}
        dcp.load(state, checkpoint_id=os.path.join(a.resume, name))
        set_state_dict(policy, opt, model_state_dict=state["policy"], optim_state_dict=state["opt"])
        start = int(name)

    steps = itertools.takewhile(lambda s: s < a.steps, itertools.count(start))
    pipe = rollouts(policy, reference, steps, a.batch, rank, world)
    pipe = updates(policy, opt, with_advantages(pipe), kl_weight=0.02, clip=2.0)
    for step, mean_reward, norm in checkpoints(policy, opt, pipe, a.save_every, a.out):
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if rank == 0 and step % 5 == 0:
            print(f"step {step} reward {mean_reward:.3f} grad norm {norm.item():.3f}", flush=True)

    if a.export:
        full = get_model_state_dict(policy, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, a.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
