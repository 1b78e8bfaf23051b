import os

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def save(folder, step, model, opt):
    m, o = get_state_dict(model, opt)
    dcp.save({"model": m, "opt": o, "step": step}, checkpoint_id=os.path.join(folder, f"step_{step:06d}"))


def newest(folder):
    done = [d for d in sorted(os.listdir(folder)) if os.path.exists(os.path.join(folder, d, ".metadata"))]
    return os.path.join(folder, done[-1]) if done else None


def load(folder, model, opt):
    path = newest(folder)
    if path is None:
        return 0
    m, o = get_state_dict(model, opt)
    state = {"model": m, "opt": o, "step": 0}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
    return state["step"]
