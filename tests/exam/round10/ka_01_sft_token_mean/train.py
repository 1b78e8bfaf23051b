import argparse
import os
import re

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from data import IGNORE, VOCAB, Batches, InstructionSet
from model import TinyLM


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=18)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--micro-batches", type=int, default=4)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--clip", type=float, default=1.0)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    return ap.parse_args()


def newest(folder):
    found = [(int(m.group(1)), n) for n in os.listdir(folder) if (m := re.fullmatch(r"step-(\d+)", n))]
    return os.path.join(folder, max(found)[1])


def token_sum_loss(logits, labels):
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE, reduction="sum"
    )


def answer_tokens(micro):
    """Number of supervised tokens in a list of micro-batches, over all ranks."""
    n = torch.tensor(float(sum((labels[:, 1:] != IGNORE).sum().item() for _, labels in micro)))
    dist.all_reduce(n)
    return n


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = TinyLM(VOCAB)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(optim, args.steps)
    batches = Batches(InstructionSet(), args.batch, args.micro_batches, rank, world)

    start = 0
    if args.resume:
        path = newest(args.resume)
        msd, osd = get_state_dict(model, optim)
        state = {"model": msd, "optim": osd, "sched": sched.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        sched.load_state_dict(state["sched"])
        start = state["step"]

    for step in range(start, args.steps):
        micro = list(batches.at(step))
        total = answer_tokens(micro)
        running = torch.zeros(())
        for i, (ids, labels) in enumerate(micro):
            model.set_requires_gradient_sync(i == len(micro) - 1)
            # fully_shard averages gradients over the ranks
            loss = token_sum_loss(model(ids), labels) * world / total
            loss.backward()
            running += loss.detach() / world
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optim.step()
        sched.step()
        optim.zero_grad()
        dist.all_reduce(running)
        if rank == 0:
            print(f"step {step + 1} loss {running.item():.4f} lr {sched.get_last_lr()[0]:.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            msd, osd = get_state_dict(model, optim)
            dcp.save(
                {"model": msd, "optim": osd, "sched": sched.state_dict(), "step": step + 1},
                checkpoint_id=os.path.join(args.out, f"step-{step + 1}"),
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
