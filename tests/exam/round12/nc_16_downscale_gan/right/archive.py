"""Checkpoints as one .npz of whole arrays: weights and the square averages of RMSprop, model by model."""
import os

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor


def _whole(t):
    t = t.detach()
    return (t.full_tensor() if isinstance(t, DTensor) else t).numpy().copy()


def write(path, step, **parts):
    arrays = {"step": np.int64(step)}
    for tag, (model, opt) in parts.items():
        for name, p in model.named_parameters():
            arrays[f"{tag}/{name}"] = _whole(p)
            for key, value in opt.state[p].items():
                arrays[f"{tag}/{name}#{key}"] = _whole(value)
    if dist.get_rank() == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        np.savez(path, **arrays)
    dist.barrier()


@torch.no_grad()
def read(path, **parts):
    with np.load(path) as z:
        for tag, (model, opt) in parts.items():
            for name, p in model.named_parameters():
                def like_p(a):
                    return distribute_tensor(torch.from_numpy(a), p.device_mesh, p.placements)

                p.copy_(like_p(z[f"{tag}/{name}"]))
                prefix = f"{tag}/{name}#"
                for full in [k for k in z.files if k.startswith(prefix)]:
                    a = z[full]
                    opt.state[p][full[len(prefix) :]] = like_p(a) if a.ndim else torch.from_numpy(a)
        return int(z["step"])
