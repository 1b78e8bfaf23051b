import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def save(folder, step, model, opt, memory):
    path = os.path.join(folder, f"step-{step:05d}")
    m, o = get_state_dict(model, opt)
    dcp.save({"model": m, "opt": o}, checkpoint_id=path)
    extras = {"step": step, "memory": memory.state_dict()}
    torch.save(extras, os.path.join(path, f"extras-{dist.get_rank()}.pt"))
    dist.barrier()


def load(folder, model, opt, memory):
    path = os.path.join(folder, sorted(os.listdir(folder))[-1])
    m, o = get_state_dict(model, opt)
    state = {"model": m, "opt": o}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
    extras = torch.load(os.path.join(path, f"extras-{dist.get_rank()}.pt"))
    memory.load_state_dict(extras["memory"])
    return extras["step"]
