"""bf16 files for the evaluation team, fp32 sharded checkpoints for ourselves"""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def publish(model, path):
    """one ordinary bf16 file, half the size"""
    weights = get_model_state_dict(model, options=FULL)
    weights = {name: w.bfloat16() for name, w in weights.items()}
    if dist.get_rank() == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save(weights, path)


def save(root, step, model, optimizer, extra):
    m, o = get_state_dict(model, optimizer)
    dcp.save({"model": m, "optim": o, "extra": {**extra, "step": step}}, checkpoint_id=f"{root}/step{step:05d}")


def restore(root, model, optimizer):
    newest = sorted(d for d in os.listdir(root) if d.startswith("step"))[-1]
    m, o = get_state_dict(model, optimizer)
    state = {"model": m, "optim": o, "extra": {"step": 0, "tokens": 0}}
    dcp.load(state, checkpoint_id=f"{root}/{newest}")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return state["extra"]
