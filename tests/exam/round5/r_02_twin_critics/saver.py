import glob
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict)

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def save(folder, step, pairs):
    """pairs: name -> (network, optimizer or None)."""
    state = {"step": step}
    for name, (net, opt) in pairs.items():
        state[f"{name}/net"] = get_model_state_dict(net, options=FULL)
        if opt is not None:
            state[f"{name}/opt"] = get_optimizer_state_dict(net, opt, options=FULL)
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        torch.save(state, os.path.join(folder, f"td3_{step:05d}.pt"))
    dist.barrier()


def restore(folder, pairs):
    state = torch.load(sorted(glob.glob(os.path.join(folder, "td3_*.pt")))[-1], weights_only=True)
    for name, (net, opt) in pairs.items():
        set_model_state_dict(net, state[f"{name}/net"], options=StateDictOptions(full_state_dict=True))
        if opt is not None:
            set_optimizer_state_dict(net, opt, state[f"{name}/opt"], options=StateDictOptions(full_state_dict=True))
    return state["step"]
