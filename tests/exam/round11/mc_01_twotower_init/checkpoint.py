import os
import re

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def save(folder, step, model, optim):
    msd, osd = get_state_dict(model, optim)
    dcp.save({"model": msd, "optim": osd, "step": step},
             checkpoint_id=os.path.join(folder, f"step_{step:05d}"))
    dist.barrier()


def load_latest(folder, model, optim):
    steps = [int(m.group(1)) for d in os.listdir(folder) if (m := re.fullmatch(r"step_(\d+)", d))]
    newest = os.path.join(folder, f"step_{max(steps):05d}")
    msd, osd = get_state_dict(model, optim)
    state = {"model": msd, "optim": osd, "step": 0}
    dcp.load(state, checkpoint_id=newest)
    set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return state["step"]
