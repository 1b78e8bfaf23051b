import os

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def _gather(model, optimizer, curriculum, step):
    model_state, optim_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optim_state, "curriculum": curriculum.state_dict(), "step": step}


def save(folder, model, optimizer, curriculum, step):
    dcp.save(_gather(model, optimizer, curriculum, step), checkpoint_id=os.path.join(folder, f"step-{step:06d}"))


def load(folder, model, optimizer, curriculum):
    newest = sorted(d for d in os.listdir(folder) if d.startswith("step-"))[-1]
    state = _gather(model, optimizer, curriculum, 0)
    dcp.load(state, checkpoint_id=os.path.join(folder, newest))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return state["step"]
