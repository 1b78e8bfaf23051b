"""One folder per checkpoint: tensors through DCP, the pipeline as a pickle of rank 0 (it is the same everywhere)."""

import os
import pickle

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def _tensors(model, optim):
    m, o = get_state_dict(model, optim)
    return {"m": m, "o": o}


def write(root, step, model, optim, pipeline):
    folder = os.path.join(root, f"{step:05d}")
    dcp.save(_tensors(model, optim), checkpoint_id=folder)
    if dist.get_rank() == 0:
        with open(os.path.join(folder, "host.pkl"), "wb") as f:
            pickle.dump({"step": step, "pipeline": pipeline.state_dict()}, f)
        with open(os.path.join(root, "LATEST"), "w") as f:
            f.write(os.path.basename(folder))
    dist.barrier()


def read(root, model, optim, pipeline):
    with open(os.path.join(root, "LATEST")) as f:
        folder = os.path.join(root, f.read().strip())
    state = _tensors(model, optim)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optim, model_state_dict=state["m"], optim_state_dict=state["o"])
    with open(os.path.join(folder, "host.pkl"), "rb") as f:
        host = pickle.load(f)
    pipeline.load_state_dict(host["pipeline"])
    return host["step"]
