import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)


def save(folder, step, model, opt):
    msd, osd = get_state_dict(model, opt)
    path = os.path.join(folder, f"step_{step:06d}")
    dcp.save({"model": msd, "optim": osd, "step": torch.tensor(step)}, checkpoint_id=path)


def load_newest(folder, model, opt):
    done = [d for d in os.listdir(folder) if os.path.exists(os.path.join(folder, d, ".metadata"))]
    path = os.path.join(folder, max(done))
    msd, osd = get_state_dict(model, opt)
    state = {"model": msd, "optim": osd, "step": torch.tensor(0)}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return int(state["step"])


def export(path, model):
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(full, path)
    dist.barrier()
