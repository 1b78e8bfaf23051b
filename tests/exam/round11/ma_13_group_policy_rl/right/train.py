"""Group-relative policy optimisation of a tiny language model (clipped ratios, several updates per rollout)."""
import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from policy import Policy
from rollout import logp, prompts, reward, sample


def experience(policy, first, last, args, rank, world):
    """Generator of rollouts: yields (iteration, ids, advantages, old log-probabilities, mean reward)."""
    for it in range(first, last):
        mine = torch.arange(args.prompts)[rank::world]
        ids = sample(policy, it, prompts(it, args.prompts)[mine], mine, args.group)
        r = reward(ids)
        grouped = r.view(-1, args.group)
        adv = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 0.1)
        with torch.no_grad():
            old = logp(policy, ids)
        mean = r.mean() / world
        dist.all_reduce(mean)
        yield it, ids, adv.flatten(), old, mean.item()


def surrogate(policy, ids, adv, old, eps=0.2):
    ratio = (logp(policy, ids) - old).exp()
    a = adv[:, None]
    return -torch.minimum(ratio * a, ratio.clamp(1 - eps, 1 + eps) * a).mean()


def checkpoint(root, it, policy, opt):
    m, o = get_state_dict(policy, opt)
    dcp.save({"policy": m, "opt": o}, checkpoint_id=str(Path(root) / f"it{it}"))


def restore(root, policy, opt):
    newest = max(Path(root).glob("it*"), key=lambda d: int(d.name[2:]))
    m, o = get_state_dict(policy, opt)
    dcp.load({"policy": m, "opt": o}, checkpoint_id=str(newest))
    set_state_dict(policy, opt, model_state_dict=m, optim_state_dict=o)
    return int(newest.name[2:])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iterations", type=int, default=8)
    ap.add_argument("--prompts", type=int, default=8)
    ap.add_argument("--group", type=int, default=8)
    ap.add_argument("--updates", type=int, default=2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="grpo")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(14)
    policy = Policy()
    fully_shard(policy.emb)
    fully_shard(policy)
    opt = torch.optim.AdamW(policy.parameters(), lr=2e-2, weight_decay=0.0)
    first = restore(args.resume, policy, opt) if args.resume else 0
    for it, ids, adv, old, mean in experience(policy, first, args.iterations, args, rank, world):
        for _ in range(args.updates):
            loss = surrogate(policy, ids, adv, old)
            loss.backward()
            # every rank sees the same global norm because the gradients are DTensors
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
        if rank == 0:
            print(f"iteration {it + 1} reward {mean:.4f}", flush=True)
        if args.save_every and (it + 1) % args.save_every == 0:
            checkpoint(args.out, it + 1, policy, opt)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
