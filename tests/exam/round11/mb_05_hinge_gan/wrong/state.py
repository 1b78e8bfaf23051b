"""Checkpoints: a file for each rank with its own shards."""
import os

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


def pack_optimizer(opt):
    out = {}
    for i, p in enumerate(p for g in opt.param_groups for p in g["params"]):
        out[i] = {k: local(v).clone() for k, v in opt.state[p].items()}
    return out


def unpack_optimizer(opt, saved):
    for i, p in enumerate(p for g in opt.param_groups for p in g["params"]):
        opt.state[p] = {}
        for k, v in saved[i].items():
            if isinstance(p, DTensor) and k != "step":
                v = DTensor.from_local(v, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
            opt.state[p][k] = v


def save(folder, step, models, opts):
    path = os.path.join(folder, f"iter{step:05d}")
    os.makedirs(path, exist_ok=True)
    torch.save({"step": step, "world": dist.get_world_size(),
                "models": [[local(p).detach().clone() for p in m.parameters()] for m in models],
                "opts": [pack_optimizer(o) for o in opts]}, os.path.join(path, f"rank{dist.get_rank()}.pt"))
    dist.barrier()


@torch.no_grad()
def load(folder, models, opts):
    path = os.path.join(folder, sorted(os.listdir(folder))[-1])
    saved = torch.load(os.path.join(path, f"rank{dist.get_rank()}.pt"))
    assert saved["world"] == dist.get_world_size(), "these checkpoints need the same number of ranks"
    for m, tensors in zip(models, saved["models"]):
        for p, t in zip(m.parameters(), tensors):
            local(p).copy_(t)
    for o, s in zip(opts, saved["opts"]):
        unpack_optimizer(o, s)
    return saved["step"]
