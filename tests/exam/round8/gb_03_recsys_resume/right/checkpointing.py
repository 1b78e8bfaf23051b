import os

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)


def newest(root):
    steps = [int(d.split("_")[1]) for d in os.listdir(root)
             if os.path.exists(os.path.join(root, d, ".metadata"))]
    return os.path.join(root, f"step_{max(steps)}")


def save_checkpoint(root, step, model, optimizer, scheduler):
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
        "scheduler": scheduler.state_dict(),
        "step": step,
    }
    dcp.save(state, checkpoint_id=os.path.join(root, f"step_{step}"))


def load_checkpoint(root, model, optimizer, scheduler):
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
        "scheduler": scheduler.state_dict(),
        "step": 0,
    }
    dcp.load(state, checkpoint_id=newest(root))
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    scheduler.load_state_dict(state["scheduler"])
    return state["step"]
