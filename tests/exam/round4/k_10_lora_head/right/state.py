"""Checkpoints of a LoRA run: only what is trained is written, the base model is read from its own file."""
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_optimizer_state_dict, set_model_state_dict,
                                                     set_optimizer_state_dict)


def adapter_state(model):
    return {n: p.detach().full_tensor() for n, p in model.named_parameters() if p.requires_grad}


def save(folder, step, model, opt):
    adapters = adapter_state(model)
    optim = get_optimizer_state_dict(model, opt, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        torch.save({"step": step, "adapters": adapters, "optim": optim}, os.path.join(folder, f"adapter-{step:04d}.pt"))
    dist.barrier()


def load(folder, model, opt):
    newest = sorted(f for f in os.listdir(folder) if f.startswith("adapter-"))[-1]
    ck = torch.load(os.path.join(folder, newest), map_location="cpu")
    set_model_state_dict(model, ck["adapters"], options=StateDictOptions(full_state_dict=True, strict=False))
    set_optimizer_state_dict(model, opt, ck["optim"], options=StateDictOptions(full_state_dict=True))
    return ck["step"]
