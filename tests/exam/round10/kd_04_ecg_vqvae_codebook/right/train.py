import argparse
import os
import re

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict,
                                                     get_optimizer_state_dict, set_model_state_dict,
                                                     set_optimizer_state_dict)
from torch.distributed.fsdp import fully_shard

from ecg import beats
from vqvae import VQVAE


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=32, help="global")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    return ap.parse_args()


def batches(x, batch, start, stop, rank, world):
    for step in range(start, stop):
        g = torch.Generator().manual_seed(77 + step)
        ids = torch.randperm(len(x), generator=g)[:batch]
        yield step, x[ids[rank::world]]


@torch.no_grad()
def reconstruction_error(model, x):
    model.eval()
    rec, _, idx = model(x)
    model.train()
    return F.mse_loss(rec, x).item(), idx.unique().numel()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = beats()
    held_out, x = x[:32], x[32:]
    model = VQVAE()
    with torch.no_grad():
        model.vq.init_from(model.encode(x[:64]))
    for b in [*model.enc, *model.dec]:
        fully_shard(b)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.99), eps=1e-5)

    start = 0
    if args.resume:
        start = max(int(m.group(1)) for m in map(re.compile(r"vq(\d+)$").match, os.listdir(args.resume)) if m)
        state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, opt)}
        dcp.load(state, checkpoint_id=f"{args.resume}/vq{start}")
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, opt, state["optim"])

    for step, xb in batches(x, args.batch, start, args.steps, rank, world):
        rec, commit, _ = model(xb)
        loss = F.mse_loss(rec, xb) + 0.25 * commit
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        log = loss.detach().clone()
        dist.all_reduce(log)
        if (step + 1) % 6 == 0:
            err, used = reconstruction_error(model, held_out)
            if rank == 0:
                print(f"step {step + 1} loss {log.item() / world:.5f} held-out mse {err:.5f} codes used {used}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save({"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, opt)},
                     checkpoint_id=f"{args.out}/vq{step + 1}")

    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if args.export and rank == 0:
        torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
