"""Checkpoints as plain numpy files: every rank writes the rows it stores, reading joins the rows of any number of ranks."""
import json
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def local_rows(t):
    return (t.to_local() if isinstance(t, DTensor) else t).detach().cpu().numpy()


def write(folder, named, facts):
    folder, rank = Path(folder), dist.get_rank()
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / f"rows_{rank:03d}.npz", **{n: local_rows(t) for n, t in named.items()})
    dist.barrier()
    if rank == 0:
        (folder / "facts.json").write_text(json.dumps({**facts, "writers": dist.get_world_size()}))
    dist.barrier()


def read(folder):
    folder = Path(folder)
    facts = json.loads((folder / "facts.json").read_text())
    files = [np.load(folder / f"rows_{r:03d}.npz") for r in range(facts["writers"])]
    return facts, {n: torch.from_numpy(np.concatenate([f[n] for f in files])) for n in files[0].files}


@torch.no_grad()
def put(target, full):
    """Copy this rank's rows of a full tensor into a sharded one."""
    if isinstance(target, DTensor):
        pieces = full.chunk(target.device_mesh.size(), dim=0)
        rank = target.device_mesh.get_local_rank()
        full, target = (pieces[rank] if rank < len(pieces) else full[:0]), target.to_local()
    target.copy_(full)
