import os
import shutil

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

KEEP = 2


def _numbered(folder):
    return sorted((n for n in os.listdir(folder) if n.startswith("t")), key=lambda n: int(n[1:]))


def take(folder, step, model, opt, sampler):
    m, o = get_state_dict(model, opt)
    path = os.path.join(folder, f"t{step}")
    dcp.save({"m": m, "o": o}, checkpoint_id=path)
    if dist.get_rank() == 0:
        torch.save(sampler.state_dict(), os.path.join(path, "sampler.pt"))
        for old in _numbered(folder)[:-KEEP]:
            shutil.rmtree(os.path.join(folder, old))
    dist.barrier()


def restore(folder, model, opt, sampler):
    name = _numbered(folder)[-1]
    m, o = get_state_dict(model, opt)
    s = {"m": m, "o": o}
    dcp.load(s, checkpoint_id=os.path.join(folder, name))
    set_state_dict(model, opt, model_state_dict=s["m"], optim_state_dict=s["o"])
    # replicated state: the same file for all ranks
    sampler.load_state_dict(torch.load(os.path.join(folder, name, "sampler.pt")))
    return int(name[1:])
