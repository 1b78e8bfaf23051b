import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
LOAD = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def save(folder, step, model, optim, state):
    parts = [torch.empty_like(state) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, state.contiguous())
    blob = {
        "model": get_model_state_dict(model, options=FULL),
        "optim": get_optimizer_state_dict(model, optim, options=FULL),
        "state": torch.cat(parts),
        "step": step,
    }
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        tmp = os.path.join(folder, "writing.tmp")
        torch.save(blob, tmp)
        os.replace(tmp, os.path.join(folder, f"snap-{step:05d}.pt"))
    dist.barrier()


def load(folder, model, optim):
    newest = sorted(f for f in os.listdir(folder) if f.startswith("snap-"))[-1]
    blob = torch.load(os.path.join(folder, newest), weights_only=False)
    set_model_state_dict(model, blob["model"], options=LOAD)
    set_optimizer_state_dict(model, optim, blob["optim"], options=LOAD)
    return blob["step"], blob["state"].chunk(dist.get_world_size())[dist.get_rank()].clone()


def export(path, model):
    weights = get_model_state_dict(model, options=FULL)
    if dist.get_rank() == 0:
        torch.save(weights, path)
