import os
import shutil

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

KEEP = 2


def write(folder, step, model, ema, opt, scalars):
    name = os.path.join(folder, f"{step:07d}")
    state = {"model": model.state_dict(), "ema": ema.shadow, "optim": get_optimizer_state_dict(model, opt)}
    dcp.save(state, checkpoint_id=name)
    if dist.get_rank() == 0:
        torch.save(scalars, os.path.join(name, "scalars.pt"))
        for old in sorted(d for d in os.listdir(folder) if d.isdigit())[:-KEEP]:
            shutil.rmtree(os.path.join(folder, old))
    dist.barrier()


def read(folder, model, ema, opt):
    name = os.path.join(folder, sorted(d for d in os.listdir(folder) if d.isdigit())[-1])
    state = {"model": model.state_dict(), "ema": ema.shadow, "optim": get_optimizer_state_dict(model, opt)}
    dcp.load(state, checkpoint_id=name)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, opt, state["optim"])
    return torch.load(os.path.join(name, "scalars.pt"))
