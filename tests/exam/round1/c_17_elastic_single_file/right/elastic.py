"""One consolidated file per checkpoint, written by rank 0, readable by any number of ranks."""

import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict


def save(path, model, opt, **extra):
    m, o = get_state_dict(model, opt, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save({"model": m, "optim": o, "extra": extra}, path + ".part")
        os.replace(path + ".part", path)
    dist.barrier()


def load(path, model, opt):
    """Every rank maps the whole file and cuts its own shards out of it."""
    blob = torch.load(path, weights_only=False, mmap=True)
    set_state_dict(
        model,
        opt,
        model_state_dict=blob["model"],
        optim_state_dict=blob["optim"],
        options=StateDictOptions(full_state_dict=True),
    )
    return blob["extra"]


def newest(folder):
    files = [f for f in os.listdir(folder) if f.endswith(".pt")]
    return os.path.join(folder, max(files, key=lambda f: int(f[:-3].split("_")[1])))
