"""Checkpoints: weights through torch.distributed.checkpoint, the optimizer as a plain file beside them."""
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict


def _optim_file(folder):
    return os.path.join(folder, "optim.pt")


def save(root, step, model, opt):
    folder = os.path.join(root, f"{step:06d}")
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=os.path.join(folder, "weights"))
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save(opt.state_dict(), _optim_file(folder))
        tmp = os.path.join(root, "latest.tmp")
        with open(tmp, "w") as f:
            f.write(f"{step:06d}")
        os.replace(tmp, os.path.join(root, "latest"))


def load(root, model, opt):
    with open(os.path.join(root, "latest")) as f:
        name = f.read().strip()
    folder = os.path.join(root, name)
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=os.path.join(folder, "weights"))
    set_model_state_dict(model, state["model"])
    opt.load_state_dict(torch.load(_optim_file(folder)))
    return int(name)
