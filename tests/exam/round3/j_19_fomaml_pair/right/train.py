"""First-order MAML with a pair of sharded networks; only the slow one has an optimizer and is saved."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from families import Family
from twins import Twins


def path_of(folder, step):
    return os.path.join(folder, f"meta_{step:06d}")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--tasks", type=int, default=3)
    ap.add_argument("--inner", type=int, default=2)
    ap.add_argument("--inner-lr", type=float, default=0.1)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="meta")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    family = Family()
    twins = Twins(family.d)
    optim = torch.optim.AdamW(twins.slow.parameters(), lr=args.lr)

    step = 0
    if args.resume:
        m, o = get_state_dict(twins.slow, optim)
        state = {"model": m, "optim": o, "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        set_state_dict(twins.slow, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        step = state["step"]

    while step < args.steps:
        optim.zero_grad()
        shown = torch.zeros(())
        for k in range(args.tasks):
            (xs, ys), (xq, yq) = family.task(step * args.tasks + k, 16, 32, rank, world)
            twins.restart()
            for _ in range(args.inner):
                F.mse_loss(twins.fast(xs), ys).backward()
                twins.descend(args.inner_lr)
            loss = F.mse_loss(twins.fast(xq), yq)
            loss.backward()
            twins.hand_over(1.0 / args.tasks)
            shown += loss.detach() / args.tasks
        torch.nn.utils.clip_grad_norm_(twins.slow.parameters(), 5.0)
        optim.step()
        step += 1

        dist.all_reduce(shown)
        if rank == 0:
            print(f"meta step {step:3d}  query mse {shown.item() / world:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(twins.slow, optim)
            dcp.save({"model": m, "optim": o, "step": step}, checkpoint_id=path_of(args.out, step))

    if args.export:
        full = get_model_state_dict(twins.slow, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
