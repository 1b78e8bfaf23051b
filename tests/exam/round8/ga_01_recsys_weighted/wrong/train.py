"""Two-tower click model, clicks weighted by watch time, sharded with FSDP2."""
import argparse
import os
import re

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict)
from torch.distributed.fsdp import fully_shard

from data import Interactions
from model import TwoTower


def newest(folder):
    found = [(int(m.group(1)), d) for d in os.listdir(folder) if (m := re.fullmatch(r"step_(\d+)", d))]
    return os.path.join(folder, max(found)[1])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="checkpoints")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = TwoTower()
    fully_shard(model.user)
    fully_shard(model.item)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    log = Interactions()

    step = 0
    if args.resume:
        msd, osd = get_state_dict(model, opt)
        state = {"model": msd, "optim": osd, "step": 0}
        dcp.load(state, checkpoint_id=newest(args.resume))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        step = state["step"]

    recent = []
    while step < args.steps:
        idx = log.global_batch(step, args.batch).chunk(world)[rank]
        user, item, label, weight = log.take(idx)
        per_sample = F.binary_cross_entropy_with_logits(model(user, item), label, reduction="none")
        total_weight = weight.sum()
        loss = (weight * per_sample).sum() / total_weight
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1

        shown = loss.detach() / world
        dist.all_reduce(shown)
        recent.append(shown.item())
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {sum(recent[-10:]) / len(recent[-10:]):.4f}")
        if args.save_every and step % args.save_every == 0:
            msd, osd = get_state_dict(model, opt)
            dcp.save({"model": msd, "optim": osd, "step": step},
                     checkpoint_id=os.path.join(args.out, f"step_{step}"))

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
