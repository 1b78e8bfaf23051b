"""Sequence tagging with a mixture of experts; every term is normalised by the tokens of all ranks."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from model import Tagger
from text import EXPERTS, TAGS, VOCAB, part_of, sentences

GET = StateDictOptions(full_state_dict=True, cpu_offload=True)
SET = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def token_sum(logits, tag):
    """(summed loss, number of tokens on all ranks)"""
    n = (tag != -100).sum()
    dist.all_reduce(n)
    return F.cross_entropy(logits.flatten(0, 1), tag.flatten(), ignore_index=-100, reduction="sum"), n


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="moe")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    ids, tag = sentences()
    torch.manual_seed(27)
    model = Tagger(VOCAB, TAGS, n=EXPERTS)
    fully_shard(model.experts)
    fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(optim, T_max=60)

    step = 0
    if args.resume:
        blob = torch.load(os.path.join(args.resume, max(os.listdir(args.resume))), weights_only=False)
        set_model_state_dict(model, blob["model"], options=SET)
        set_optimizer_state_dict(model, optim, blob["optim"], options=SET)
        sched.load_state_dict(blob["sched"])
        step = blob["step"]

    while step < args.steps:
        x, y, noise = part_of(step, args.batch, rank, world, ids, tag)
        logits, balance, z = model(x, noise)
        ce, n = token_sum(logits, y)
        loss = ce / n + 0.02 * balance + 1e-3 * z
        (loss * world).backward()  # every term is divided by global counts; undo the mean over the ranks
        optim.step()
        sched.step()
        optim.zero_grad()
        step += 1

        shown = torch.stack([(ce / n).detach(), balance.detach()])
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step:3d}  token ce {shown[0]:.4f}  balance {shown[1]:.3f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            blob = {
                "model": get_model_state_dict(model, options=GET),
                "optim": get_optimizer_state_dict(model, optim, options=GET),
                "sched": sched.state_dict(),
                "step": step,
            }
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                torch.save(blob, os.path.join(args.out, f"moe_{step:06d}.pt"))
            dist.barrier()

    if args.export:
        full = get_model_state_dict(model, options=GET)
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
