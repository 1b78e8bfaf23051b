"""Checkpoints of a sharded run: weights and optimizer through DCP, the small rest in one file."""
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def save(root, step, model, opt, sched):
    path = os.path.join(root, f"{step:06d}")
    m, o = get_state_dict(model, opt)
    dcp.save({"model": m, "optim": o}, checkpoint_id=path)
    rng = torch.get_rng_state()
    if dist.get_rank() == 0:
        torch.save({"step": step, "sched": sched.state_dict(), "rng": rng}, os.path.join(path, "trainer.pt"))
    dist.barrier()


def load(root, model, opt, sched):
    path = os.path.join(root, max(os.listdir(root)))
    m, o = get_state_dict(model, opt)
    state = {"model": m, "optim": o}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
    rest = torch.load(os.path.join(path, "trainer.pt"), weights_only=False)
    sched.load_state_dict(rest["sched"])
    torch.set_rng_state(rest["rng"])
    return rest["step"]
