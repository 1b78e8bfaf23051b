import os
import re

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def save(folder, step, model, optim):
    model_sd, optim_sd = get_state_dict(model, optim)
    dcp.save(
        {"model": model_sd, "optim": optim_sd, "step": step}, checkpoint_id=os.path.join(folder, f"step_{step:05d}")
    )


def newest(folder):
    found = [d for d in os.listdir(folder) if re.fullmatch(r"step_\d+", d)]
    return os.path.join(folder, max(found))


def load(folder, model, optim):
    model_sd, optim_sd = get_state_dict(model, optim)
    state = {"model": model_sd, "optim": optim_sd, "step": 0}
    dcp.load(state, checkpoint_id=newest(folder))
    set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return state["step"]
