import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_state_dict,
                                                     set_state_dict)
from torch.distributed.fsdp import fully_shard

from data import EpochSampler, make_dataset
from losses import masked_multitask_mse
from model import MolNet


def newest(folder):
    steps = [int(d.split("_")[1]) for d in os.listdir(folder) if d.startswith("step_")]
    return max(steps)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--global-batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default=None)
    ap.add_argument("--resume", default=None)
    ap.add_argument("--export", default=None)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    types, adj, y, measured = make_dataset()
    sampler = EpochSampler(len(types), args.global_batch, rank, world, seed=5)

    model = MolNet()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    start = 0

    if args.resume:
        start = newest(args.resume)
        msd, osd = get_state_dict(model, opt)
        state = {"model": msd, "optim": osd}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, f"step_{start}"))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])

    for step in range(start, args.steps):
        ids = sampler.batch(step)
        loss = masked_multitask_mse(model(types[ids], adj[ids]), y[ids], measured[ids])
        opt.zero_grad()
        loss.backward()
        opt.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and (step % 4 == 0 or step == args.steps - 1):
            print(f"step {step} loss {shown.item() / world:.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            msd, osd = get_state_dict(model, opt)
            dcp.save({"model": msd, "optim": osd}, checkpoint_id=os.path.join(args.out, f"step_{step + 1}"))

    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0 and args.export:
        torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
