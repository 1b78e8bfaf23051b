"""Recommender: row-wise Adagrad with bounded rows on the tables, AdamW on the dense part."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from model import Ranker
from ratings import Loader, ratings
from rowwise import RowwiseAdagrad


def collect(model, sparse, dense, loader):
    return {
        "model": get_model_state_dict(model),
        "dense": get_optimizer_state_dict(model.dense, dense),
        "rows": {n: sparse.state[p]["rows"] for n, p in model.tables.named_parameters()},
        "at": loader.at,
    }


def restore(path, model, sparse, dense, loader):
    blob = collect(model, sparse, dense, loader)
    dcp.load(blob, checkpoint_id=path)
    set_model_state_dict(model, blob["model"])
    set_optimizer_state_dict(model.dense, dense, blob["dense"])
    for n, p in model.tables.named_parameters():
        sparse.state[p]["rows"].copy_(blob["rows"][n])
    loader.at = blob["at"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--batch", type=int, default=96)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="rec")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(33)
    model = Ranker()
    fully_shard(model.tables)
    fully_shard(model.dense)
    fully_shard(model)
    sparse = RowwiseAdagrad(model.tables.parameters(), lr=0.15, max_norm=1.5)
    dense = torch.optim.AdamW(model.dense.parameters(), lr=5e-3)
    loader = Loader(ratings(), args.batch, rank, world)
    if args.resume:
        restore(os.path.join(args.resume, max(os.listdir(args.resume))), model, sparse, dense, loader)

    for u, i, t, y in loader:
        step = loader.at
        loss = F.mse_loss(model(u, i, t), y)
        loss.backward()
        for opt in (sparse, dense):
            opt.step()
            opt.zero_grad()

        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step:3d}  mse {shown.item() / world:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save(collect(model, sparse, dense, loader), checkpoint_id=os.path.join(args.out, f"{step:07d}"))
        if step >= args.steps:
            break

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
