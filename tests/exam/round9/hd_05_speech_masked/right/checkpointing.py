from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def save(folder, step, model, opt, masker):
    path = Path(folder) / f"step{step:05d}"
    weights, optim = get_state_dict(model, opt)
    dcp.save({"model": weights, "optim": optim}, checkpoint_id=path)
    torch.save({"step": step, "masker": masker.state()}, path / f"trainer_{dist.get_rank()}.pt")
    dist.barrier()


def load_latest(folder, model, opt, masker):
    path = max(Path(folder).glob("step*"))
    weights, optim = get_state_dict(model, opt)
    state = {"model": weights, "optim": optim}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
    trainer = torch.load(path / f"trainer_{dist.get_rank()}.pt")
    masker.set_state(trainer["masker"])
    return trainer["step"]
