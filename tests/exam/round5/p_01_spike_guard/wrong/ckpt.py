import os
import re

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def save(out, step, model, opt, extra):
    msd, osd = get_state_dict(model, opt)
    path = os.path.join(out, f"step_{step:06d}")
    dcp.save({"model": msd, "optim": osd}, checkpoint_id=path)
    if dist.get_rank() == 0:
        torch.save({"step": step, **extra}, os.path.join(path, "extra.pt"))
    dist.barrier()


def newest(folder):
    found = [d for d in os.listdir(folder) if re.fullmatch(r"step_\d+", d) and os.path.exists(os.path.join(folder, d, "extra.pt"))]
    return os.path.join(folder, max(found)) if found else None


def load(folder, model, opt):
    path = newest(folder)
    if path is None:
        raise FileNotFoundError(f"no checkpoint in {folder}")
    msd, osd = get_state_dict(model, opt)
    dcp.load({"model": msd, "optim": osd}, checkpoint_id=path)
    set_state_dict(model, opt, model_state_dict=msd, optim_state_dict=osd)
    return torch.load(os.path.join(path, "extra.pt"), weights_only=False)
