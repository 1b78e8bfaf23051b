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

GET = StateDictOptions(full_state_dict=True, cpu_offload=True)
SET = StateDictOptions(full_state_dict=True)


def save(folder, step, pairs):
    blob = {"step": step, "model": {}, "optim": {}}
    for name, (net, opt) in pairs.items():
        blob["model"][name] = get_model_state_dict(net, options=GET)
        blob["optim"][name] = get_optimizer_state_dict(net, opt, options=GET)
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        torch.save(blob, os.path.join(folder, f"peers_{step:05d}.pt"))
    dist.barrier()


def load(folder, pairs):
    path = os.path.join(folder, max(os.listdir(folder)))
    blob = torch.load(path, weights_only=False)
    for name, (net, opt) in pairs.items():
        set_model_state_dict(net, blob["model"][name], options=SET)
        set_optimizer_state_dict(net, opt, blob["optim"][name], options=SET)
    return blob["step"]


def export(path, pairs):
    nets = {name: get_model_state_dict(net, options=GET) for name, (net, _) in pairs.items()}
    if dist.get_rank() == 0:
        torch.save(nets, path)
