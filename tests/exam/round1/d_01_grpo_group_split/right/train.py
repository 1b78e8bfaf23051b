"""GRPO on a toy task: the policy must answer prompt p with p, p+1, p+2, ..."""

import argparse

import torch
import torch.distributed as dist

import checkpoint
from policy import build, token_logps
from rollout import generate, gumbel, reward

VOCAB, LENGTH, N_PROMPTS = 10, 4, 12
BOS = VOCAB


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30, help="rollout iterations")
    ap.add_argument("--prompts-per-step", type=int, default=6)
    ap.add_argument("--group", type=int, default=8, help="answers for each prompt, over all ranks")
    ap.add_argument("--inner", type=int, default=2)
    ap.add_argument("--lr", type=float, default=6e-3)
    ap.add_argument("--clip", type=float, default=0.2)
    ap.add_argument("--kl", type=float, default=0.02)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default=None)
    ap.add_argument("--resume", default=None)
    return ap.parse_args()


def advantages(rewards, world):
    """rewards [P, G / world] of this rank's share of every group."""
    shares = [torch.empty_like(rewards) for _ in range(world)]
    dist.all_gather(shares, rewards)
    group = torch.cat(shares, dim=1)
    baseline = group.mean(dim=1, keepdim=True)
    scale = group.std(dim=1, keepdim=True)
    return (rewards - baseline) / (scale + 1e-3)


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    shape = dict(n_prompts=N_PROMPTS, vocab=VOCAB, length=LENGTH)
    policy = build(0, **shape)
    reference = build(0, **shape).requires_grad_(False)
    optim = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=0.0, eps=1e-5)
    start = checkpoint.load(args.resume, policy, optim) if args.resume else 0

    mine = list(range(rank, args.group, world))
    for step in range(start, args.steps):
        gen = torch.Generator().manual_seed(77 + step)
        prompts = torch.randperm(N_PROMPTS, generator=gen)[: args.prompts_per_step]
        noise = torch.stack([gumbel(step, i, g, LENGTH, VOCAB) for i in range(len(prompts)) for g in mine])
        flat = prompts.repeat_interleave(len(mine))
        tokens = generate(policy, flat, noise, BOS)
        rewards = reward(flat, tokens, VOCAB).view(len(prompts), len(mine))
        adv = advantages(rewards, world).view(-1, 1)

        with torch.no_grad():
            old = token_logps(policy, flat, tokens, BOS)
            ref = token_logps(reference, flat, tokens, BOS)
        for _ in range(args.inner):
            logp = token_logps(policy, flat, tokens, BOS)
            ratio = (logp - old).exp()
            surrogate = torch.minimum(ratio * adv, ratio.clamp(1 - args.clip, 1 + args.clip) * adv)
            gap = ref - logp
            loss = (-surrogate + args.kl * (gap.exp() - gap - 1)).mean()
            optim.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optim.step()

        stats = torch.stack([loss.detach(), rewards.mean()])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"iter {step:3d} loss {stats[0] / world:+.4f} reward {stats[1] / world:.4f}", flush=True)
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            checkpoint.save(args.out, step + 1, policy, optim)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
