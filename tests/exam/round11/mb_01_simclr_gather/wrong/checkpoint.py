import os

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def save(folder, step, model, optimizer, scheduler):
    m, o = get_state_dict(model, optimizer)
    dcp.save({"model": m, "optim": o, "scheduler": scheduler.state_dict(), "step": step},
             checkpoint_id=os.path.join(folder, f"step_{step:06d}"))


def load_latest(folder, model, optimizer, scheduler):
    name = sorted(d for d in os.listdir(folder) if d.startswith("step_"))[-1]
    m, o = get_state_dict(model, optimizer)
    state = {"model": m, "optim": o, "scheduler": scheduler.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=os.path.join(folder, name))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    scheduler.load_state_dict(state["scheduler"])
    dist.barrier()
    return state["step"]
