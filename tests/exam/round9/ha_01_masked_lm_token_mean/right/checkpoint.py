import os

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def save(folder, step, model, optimizer, scheduler):
    model_sd, optim_sd = get_state_dict(model, optimizer)
    state = {"model": model_sd, "optim": optim_sd, "sched": scheduler.state_dict(), "step": step}
    dcp.save(state, checkpoint_id=os.path.join(folder, f"step_{step:05d}"))
    dist.barrier()


def newest(folder):
    names = [n for n in os.listdir(folder) if n.startswith("step_")
             and os.path.exists(os.path.join(folder, n, ".metadata"))]
    return os.path.join(folder, max(names))


def load(folder, model, optimizer, scheduler):
    model_sd, optim_sd = get_state_dict(model, optimizer)
    state = {"model": model_sd, "optim": optim_sd, "sched": scheduler.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=newest(folder))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    scheduler.load_state_dict(state["sched"])
    return state["step"]
