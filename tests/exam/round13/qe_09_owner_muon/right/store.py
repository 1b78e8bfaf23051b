"""Checkpoints: DCP for the weights and AdamW, one file a rank for what OwnerMuon holds."""
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict


def save(folder, step, model, adam, muon, names):
    folder = Path(folder) / f"step{step:04d}"
    state = {"model": get_model_state_dict(model), "adam": get_optimizer_state_dict(model, adam), "step": step}
    dcp.save(state, checkpoint_id=str(folder))
    torch.save(muon.owned(names), folder / f"muon_{dist.get_rank()}.pt")
    dist.barrier()


def load(folder, model, adam, muon, names):
    folder = max(Path(folder).glob("step*"))
    state = {"model": get_model_state_dict(model), "adam": get_optimizer_state_dict(model, adam), "step": 0}
    dcp.load(state, checkpoint_id=str(folder))
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, adam, state["adam"])
    buffers = {}
    for part in sorted(folder.glob("muon_*.pt")):
        buffers.update(torch.load(part))
    muon.adopt(names, buffers)
    return state["step"]
