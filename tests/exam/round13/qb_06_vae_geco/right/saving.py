import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def save(folder, step, model, optimizer, geco):
    m, o = get_state_dict(model, optimizer, options=WHOLE)
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        tmp = os.path.join(folder, "vae.tmp")
        torch.save({"step": step, "model": m, "optimizer": o, "geco": geco.state_dict()}, tmp)
        os.replace(tmp, os.path.join(folder, "vae.pt"))
    dist.barrier()


def restore(folder, model, optimizer, geco):
    blob = torch.load(os.path.join(folder, "vae.pt"))
    set_state_dict(model, optimizer, model_state_dict=blob["model"], optim_state_dict=blob["optimizer"], options=WHOLE)
    geco.load_state_dict(blob["geco"])
    return blob["step"]
