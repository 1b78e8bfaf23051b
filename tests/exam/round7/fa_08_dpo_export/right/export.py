"""Consolidates the shards of all ranks into one file that a plain model can load."""
import os

import torch
import torch.distributed as dist


def write_shards(model, folder):
    """Every rank writes what it holds and how the whole tensor looks."""
    os.makedirs(folder, exist_ok=True)
    shards = {}
    for name, p in model.named_parameters():
        dim = p.placements[0].dim
        shards[name] = {"data": p.to_local().detach().clone(), "shape": tuple(p.shape), "dim": dim}
    torch.save(shards, os.path.join(folder, f"shard_{dist.get_rank()}.pt"))
    dist.barrier()


def consolidate(folder, world):
    parts = [torch.load(os.path.join(folder, f"shard_{r}.pt")) for r in range(world)]
    full = {}
    for name, first in parts[0].items():
        whole = torch.cat([part[name]["data"] for part in parts], dim=first["dim"])
        full[name] = whole.view(first["shape"])
    return full


def export(model, folder):
    write_shards(model, folder)
    if dist.get_rank() == 0:
        torch.save(consolidate(folder, dist.get_world_size()), os.path.join(folder, "model.pt"))
    dist.barrier()
