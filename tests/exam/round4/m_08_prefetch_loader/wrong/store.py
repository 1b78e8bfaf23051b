import json
import os

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def save(root, step, model, opt, loader):
    path = os.path.join(root, f"iter_{step:06d}")
    msd, osd = get_state_dict(model, opt)
    dcp.save({"model": msd, "optim": osd}, checkpoint_id=path)
    if dist.get_rank() == 0:
        with open(os.path.join(path, "trainer.json"), "w") as f:
            json.dump({"step": step, "loader": loader.state_dict()}, f)
    dist.barrier()


def load(root, model, opt, loader):
    path = os.path.join(root, max(d for d in os.listdir(root) if d.startswith("iter_")))
    msd, osd = get_state_dict(model, opt)
    dcp.load({"model": msd, "optim": osd}, checkpoint_id=path)
    set_state_dict(model, opt, model_state_dict=msd, optim_state_dict=osd)
    with open(os.path.join(path, "trainer.json")) as f:
        meta = json.load(f)
    loader.load_state_dict(meta["loader"])
    return meta["step"]
