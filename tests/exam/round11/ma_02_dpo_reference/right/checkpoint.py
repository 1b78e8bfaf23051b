import os

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def save_checkpoint(root, step, model, optimizer):
    model_sd, optim_sd = get_state_dict(model, optimizer)
    dcp.save({"policy": model_sd, "optim": optim_sd, "step": torch.tensor(step)},
             checkpoint_id=os.path.join(root, f"ckpt-{step}"))


def load_checkpoint(root, model, optimizer):
    steps = [int(d.split("-")[1]) for d in os.listdir(root) if d.startswith("ckpt-")]
    model_sd, optim_sd = get_state_dict(model, optimizer)
    state = {"policy": model_sd, "optim": optim_sd, "step": torch.tensor(0)}
    dcp.load(state, checkpoint_id=os.path.join(root, f"ckpt-{max(steps)}"))
    set_state_dict(model, optimizer, model_state_dict=state["policy"], optim_state_dict=state["optim"])
    return int(state["step"])
