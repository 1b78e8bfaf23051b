"""GRPO on a small instruction-following game.

Per round: sample a group of answers for every prompt with the current policy, score them, then make two clipped policy
updates over the same answers. Sampling noise is drawn per (round, prompt), so the answers do not depend on how the prompts
are dealt out to the ranks.
"""
import argparse
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


@dataclass(frozen=True)
class Cfg:
    rounds: int = 9
    inner: int = 2
    prompts: int = 8
    group: int = 6
    vocab: int = 16
    answer: int = 5
    lr: float = 1e-2
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl: float = 0.02
    max_norm: float = 1.0


class Actor(nn.Module):
    def __init__(self, cfg, dim=40):
        super().__init__()
        self.emb = nn.Embedding(cfg.vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))
        self.out = nn.Linear(dim, cfg.vocab)

    def forward(self, ids):
        h, _ = self.rnn(self.emb(ids))
        return self.out(h + self.ff(h)).log_softmax(-1)


def make(cfg):
    torch.manual_seed(66)
    net = Actor(cfg)
    fully_shard(net.rnn)
    fully_shard(net.ff)
    return fully_shard(net)


def prompts_of(cfg, rnd):
    g = torch.Generator().manual_seed(600 + rnd)
    return torch.randint(0, cfg.vocab, (cfg.prompts, 3), generator=g)


def noise_for(cfg, rnd, index):
    g = torch.Generator().manual_seed(1_000_000 + rnd * 1000 + index)
    u = torch.rand(cfg.group, cfg.answer, cfg.vocab, generator=g, dtype=torch.float64)
    return -(-(u.clamp_min(1e-12)).log()).log()


def reward(prompt, answer):
    """Share of the answer tokens that are greater than the first prompt token and differ from their neighbour."""
    above = (answer > prompt[:, :1]).float()
    fresh = torch.ones_like(above)
    fresh[:, 1:] = (answer[:, 1:] != answer[:, :-1]).float()
    return (above * fresh).mean(1)


@torch.no_grad()
def rollout(actor, cfg, rnd, mine):
    prompt = prompts_of(cfg, rnd)[mine].repeat_interleave(cfg.group, 0)
    gumbel = torch.cat([noise_for(cfg, rnd, i) for i in mine])
    seq = prompt
    for t in range(cfg.answer):
        logp = actor(seq)[:, -1].double()
        seq = torch.cat([seq, (logp + gumbel[:, t]).argmax(-1, keepdim=True)], 1)
    return prompt, seq


def answer_logps(net, cfg, seq):
    logp = net(seq[:, :-1])[:, -cfg.answer :]
    return logp.gather(-1, seq[:, -cfg.answer :, None]).squeeze(-1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    cfg = Cfg()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    actor, start_policy = make(cfg), make(cfg)  # the same seed: the KL anchor is the untrained actor
    start_policy.requires_grad_(False)
    opt = torch.optim.Adam(actor.parameters(), lr=cfg.lr, betas=(0.9, 0.99))

    first = 0
    if args.resume:
        first = max(int(n.split("_")[1]) for n in os.listdir(args.resume))
        model_state, opt_state = get_state_dict(actor, opt)
        dcp.load({"actor": model_state, "opt": opt_state}, checkpoint_id=os.path.join(args.resume, f"round_{first}"))
        set_state_dict(actor, opt, model_state_dict=model_state, optim_state_dict=opt_state)

    for rnd in range(first, cfg.rounds):
        mine = list(range(cfg.prompts))[rank::world]
        prompt, seq = rollout(actor, cfg, rnd, mine)
        r = reward(prompt, seq[:, -cfg.answer :]).view(len(mine), cfg.group)
        adv = ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-2)).view(-1, 1)
        with torch.no_grad():
            old = answer_logps(actor, cfg, seq)
            ref = answer_logps(start_policy, cfg, seq)
        for _ in range(cfg.inner):
            new = answer_logps(actor, cfg, seq)
            ratio = (new - old).exp()
            surrogate = torch.minimum(ratio * adv, ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * adv)
            kl = (ref - new).exp() - (ref - new) - 1
            loss = (cfg.kl * kl - surrogate).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(actor.parameters(), cfg.max_norm)
            opt.step()
            opt.zero_grad()
        stats = torch.stack([loss.detach(), r.mean()]) / world
        dist.all_reduce(stats)
        if rank == 0:
            print(f"round {rnd + 1} loss {stats[0].item():.5f} reward {stats[1].item():.4f}", flush=True)
        if args.save_every and (rnd + 1) % args.save_every == 0:
            model_state, opt_state = get_state_dict(actor, opt)
            dcp.save({"actor": model_state, "opt": opt_state}, checkpoint_id=os.path.join(args.out, f"round_{rnd + 1}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
