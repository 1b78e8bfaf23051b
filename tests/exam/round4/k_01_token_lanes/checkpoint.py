import os
import re

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict


def latest(folder):
    names = [n for n in os.listdir(folder) if re.fullmatch(r"step_\d+\.pt", n)] if os.path.isdir(folder) else []
    return os.path.join(folder, max(names)) if names else None


def save(folder, step, model, opt, reader):
    opts = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_sd, opt_sd = get_state_dict(model, opt, options=opts)
    readers = [None] * dist.get_world_size()
    dist.all_gather_object(readers, reader.state_dict())
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, f"step_{step:06d}.pt")
        torch.save({"step": step, "model": model_sd, "opt": opt_sd, "reader": readers}, path + ".tmp")
        os.replace(path + ".tmp", path)
    dist.barrier()


def load(folder, model, opt, reader):
    path = latest(folder)
    if path is None:
        return 0
    ck = torch.load(path, map_location="cpu", weights_only=True)
    set_state_dict(model, opt, model_state_dict=ck["model"], optim_state_dict=ck["opt"],
                   options=StateDictOptions(full_state_dict=True))
    reader.load_state_dict(ck["reader"][dist.get_rank()])
    return ck["step"]
