import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

from documents import step_documents
from model import LM
from planner import IGNORE, plan, tensors


def accumulate(model, docs, rank, world):
    """adds up the gradient of the mean token loss of all documents of the step"""
    groups, n_tokens = plan(docs, rank, world)
    total = torch.zeros(())
    for i, group in enumerate(groups):
        ids, labels = tensors(group, docs)
        model.set_requires_gradient_sync(i == len(groups) - 1)
        loss = (
            F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum") / n_tokens
        )
        (loss * world).backward()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item(), len(groups), sum(1 for g in groups if not g)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(19)
    model = LM()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=args.steps, power=1.0)

    step = 0
    if args.resume:
        step = max(map(int, os.listdir(args.resume)))
        m, o = get_state_dict(model, optimizer)
        state = {"model": m, "optim": o, "schedule": schedule.state_dict()}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, str(step)))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        schedule.load_state_dict(state["schedule"])

    fillers = 0
    while step < args.steps:
        loss, rounds, empty = accumulate(model, step_documents(step), rank, world)
        fillers += empty
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        step += 1
        if rank == 0:
            print(f"step {step} rounds {rounds} loss {loss:.4f}")
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, optimizer)
            state = {"model": m, "optim": o, "schedule": schedule.state_dict()}
            dcp.save(state, checkpoint_id=os.path.join(args.out, str(step)))
    print(f"rank {rank} took part in {fillers} rounds without documents")

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
