import os
import re

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict


def newest(folder):
    steps = [int(m.group(1)) for m in (re.fullmatch(r"step(\d+)", d) for d in os.listdir(folder)) if m]
    if not steps:
        raise FileNotFoundError(f"no checkpoint below {folder}")
    return os.path.join(folder, f"step{max(steps)}")


def _state(model, ema, optimizer):
    return {
        "model": model.state_dict(),
        "ema": ema.module.state_dict(),
        "optim": get_optimizer_state_dict(model, optimizer),
    }


def save(folder, step, model, ema, optimizer, scheduler):
    state = _state(model, ema, optimizer)
    state["progress"] = {"step": step, "ema_updates": ema.updates, "sched": scheduler.state_dict()}
    dcp.save(state, checkpoint_id=os.path.join(folder, f"step{step}"))


def load(folder, model, ema, optimizer, scheduler):
    state = _state(model, ema, optimizer)
    state["progress"] = {"step": 0, "ema_updates": 0, "sched": scheduler.state_dict()}
    dcp.load(state, checkpoint_id=newest(folder))
    model.load_state_dict(state["model"])
    ema.module.load_state_dict(state["ema"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    ema.updates = state["progress"]["ema_updates"]
    scheduler.load_state_dict(state["progress"]["sched"])
    return state["progress"]["step"]
