import os

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def _pack(model, opt, step):
    m, o = get_state_dict(model, opt)
    return {"model": m, "optim": o, "step": torch.tensor(step)}


def save(folder, model, opt, step):
    dcp.save(_pack(model, opt, step), checkpoint_id=os.path.join(folder, f"step_{step:05d}"))


def load_latest(folder, model, opt):
    names = sorted(n for n in os.listdir(folder) if n.startswith("step_"))
    if not names:
        return 0
    state = _pack(model, opt, 0)
    dcp.load(state, checkpoint_id=os.path.join(folder, names[-1]))
    set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return int(state["step"])
