import os

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def save(root, step, model, opt):
    m, o = get_state_dict(model, opt)
    dcp.save({"model": m, "optim": o, "step": step}, checkpoint_id=os.path.join(root, f"step_{step:05d}"))


def load_latest(root, model, opt):
    newest = max(d for d in os.listdir(root) if d.startswith("step_"))
    m, o = get_state_dict(model, opt)
    state = {"model": m, "optim": o, "step": 0}
    dcp.load(state, checkpoint_id=os.path.join(root, newest))
    set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return state["step"]
