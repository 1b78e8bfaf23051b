"""Checkpoints: DCP for the tensors, a small side file for everything else."""
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_state_dict


def save(folder, step, model, opt, sched):
    path = os.path.join(folder, f"{step:06d}")
    dcp.save({"model": get_model_state_dict(model), "opt": get_optimizer_state_dict(model, opt)},
             checkpoint_id=path)
    if dist.get_rank() == 0:
        torch.save({"step": step, "sched": sched.state_dict(), "rng": torch.get_rng_state()}, os.path.join(path, "side.pt"))
    dist.barrier()


def load_newest(folder, model, opt, sched):
    path = os.path.join(folder, max(os.listdir(folder)))
    tensors = {"model": get_model_state_dict(model), "opt": get_optimizer_state_dict(model, opt)}
    dcp.load(tensors, checkpoint_id=path)
    set_state_dict(model, opt, model_state_dict=tensors["model"], optim_state_dict=tensors["opt"])
    side = torch.load(os.path.join(path, "side.pt"))
    sched.load_state_dict(side["sched"])
    torch.set_rng_state(side["rng"])
    return side["step"]
