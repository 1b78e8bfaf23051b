"""GRPO on a toy language task: write many distinct tokens in ascending order, then stop.

Each iteration samples groups of answers, makes group-relative advantages, and takes several clipped policy-gradient steps with a KL penalty to a frozen
reference. The loss is a sum over tokens divided by the number of generated tokens of the whole job; gradients are summed (not averaged) over the ranks.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from policy import Policy, sample

GROUPS, ANSWERS, LENGTH = 8, 8, 8


def reward(ids, mask):
    tok = ids[:, 1:]
    up = ((tok[:, 1:] > tok[:, :-1]) & mask[:, 1:]).float().sum(1)
    return up - 0.1 * mask.float().sum(1)


def build():
    torch.manual_seed(5)
    p = Policy()
    fully_shard(p.refine, reshard_after_forward=True)
    fully_shard(p, reshard_after_forward=True)
    for m in (p.refine, p):
        m.set_force_sum_reduction_for_comms(True)
        m.set_gradient_divide_factor(1.0)
    return p


def logprobs(policy, ids):
    lp = policy(ids[:, :-1])
    return lp.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)


def total(*values):
    t = torch.stack([v.detach().double() for v in values])
    dist.all_reduce(t)
    return t


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iters", type=int, default=8)
    ap.add_argument("--inner", type=int, default=3)
    ap.add_argument("--kl-limit", type=float, default=0.05)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    policy, reference = build(), build().requires_grad_(False)
    opt = torch.optim.AdamW(policy.parameters(), lr=4e-3, weight_decay=0.0)
    gen = torch.Generator().manual_seed(99)
    updates = start = 0

    if args.resume:
        newest = max(os.listdir(args.resume), key=lambda d: int(d[4:]))
        m, o = get_state_dict(policy, opt)
        st = {"model": m, "opt": o, "rng": gen.get_state(), "iter": 0, "updates": 0}
        dcp.load(st, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(policy, opt, model_state_dict=st["model"], optim_state_dict=st["opt"])
        gen.set_state(st["rng"])
        start, updates = st["iter"], st["updates"]

    k = GROUPS // world * ANSWERS
    for it in range(start, args.iters):
        uniforms = torch.rand(GROUPS * ANSWERS, LENGTH, generator=gen, dtype=torch.float64)[rank * k:(rank + 1) * k]
        ids, mask = sample(policy, uniforms)
        with torch.no_grad():
            old, ref = logprobs(policy, ids), logprobs(reference, ids)
        r = reward(ids, mask)
        g = r.view(-1, ANSWERS)
        adv = ((g - g.mean(1, keepdim=True)) / (g.std(1, keepdim=True) + 1e-2)).view(-1, 1)
        tokens = total(mask.sum())[0].item()
        policy_loss = 0.0
        for inner in range(args.inner):
            new = logprobs(policy, ids)
            ratio = (new - old).exp()
            gain = torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
            kl = (ref - new).exp() - (ref - new) - 1
            loss = ((-gain + 0.02 * kl) * mask).sum() / tokens
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            opt.step()
            opt.zero_grad()
            updates += 1
            # the same number of inner steps on every rank: the stop is decided on the global estimate
            moved, policy_loss = (total(((old - new).detach() * mask).sum() / tokens, loss)).tolist()
            if abs(moved) > args.kl_limit:
                break
        mean_r = total(r.sum())[0].item() / (GROUPS * ANSWERS)
        if rank == 0:
            print(f"iter {it + 1} updates {updates} reward {mean_r:.4f} loss {policy_loss:.5f} moved {moved:.4f}", flush=True)
        if args.save_every and (it + 1) % args.save_every == 0:
            m, o = get_state_dict(policy, opt)
            dcp.save({"model": m, "opt": o, "rng": gen.get_state(), "iter": it + 1, "updates": updates},
                     checkpoint_id=os.path.join(args.out, f"iter{it + 1}"))

    if args.export:
        full = get_model_state_dict(policy, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
