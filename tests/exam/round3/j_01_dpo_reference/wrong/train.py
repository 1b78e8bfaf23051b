"""DPO fine-tuning of a small language model from preference pairs, FSDP2."""

import argparse
import os
import re

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

from dpo import dpo_loss
from model import CausalLM, sft_base
from pairs import batch_for, preference_set, sft_set


def shard(lm):
    for layer in lm.layers:
        fully_shard(layer)
    return fully_shard(lm)


def save(root, step, policy, optim):
    model_sd, optim_sd = get_state_dict(policy, optim)
    dcp.save(
        {"policy": model_sd, "optim": optim_sd, "step": step}, checkpoint_id=os.path.join(root, f"step_{step:05d}")
    )


def load(root, policy, optim):
    newest = max((d for d in os.listdir(root) if re.fullmatch(r"step_\d+", d)))
    model_sd, optim_sd = get_state_dict(policy, optim)
    state = {"policy": model_sd, "optim": optim_sd, "step": 0}
    dcp.load(state, checkpoint_id=os.path.join(root, newest))
    set_state_dict(policy, optim, model_state_dict=state["policy"], optim_state_dict=state["optim"])
    return state["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--beta", type=float, default=0.1)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default=None)
    ap.add_argument("--export", default=None)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    base = sft_base(0, sft_set())
    policy = CausalLM()
    policy.load_state_dict(base)
    shard(policy)
    optim = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=0.0)
    step = 0

    if args.resume:
        step = load(args.resume, policy, optim)

    # reference: a frozen copy of the policy
    ref = shard(CausalLM().requires_grad_(False))
    ref.load_state_dict(policy.state_dict())
    ref.eval()

    chosen, rejected = preference_set()
    while step < args.steps:
        idx = batch_for(step, args.batch, rank, world, len(chosen))
        loss, acc = dpo_loss(policy, ref, chosen[idx], rejected[idx], args.beta)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optim.step()
        optim.zero_grad()
        step += 1

        report = torch.stack([loss.detach(), acc])
        dist.all_reduce(report)
        report /= world
        if rank == 0:
            print(f"step {step:3d}  dpo {report[0]:.4f}  reward-acc {report[1]:.3f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            save(args.out, step, policy, optim)

    if args.export:
        full = get_model_state_dict(policy, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
