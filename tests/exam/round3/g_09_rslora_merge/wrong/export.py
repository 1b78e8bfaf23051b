"""Writes the fine-tuned model under the names of the base model, adapters folded in."""

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict


def merged_state(full, r, alpha):
    out = {}
    for name, tensor in full.items():
        if name.endswith(".linear.weight"):
            stem = name.removesuffix(".linear.weight")
            delta = full[f"{stem}.up.weight"] @ full[f"{stem}.down.weight"]
            out[f"{stem}.weight"] = tensor + delta * (alpha / r)
        elif not name.endswith((".up.weight", ".down.weight")):
            out[name] = tensor
    return out


def write(model, path, r, alpha):
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(merged_state(full, r, alpha), path)
    dist.barrier()
