"""Candidate releases during the fine-tuning: plain weights with the adapters folded in."""
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from lora import merge


def make_release(model, folder, step):
    merge(model)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    plain = {k.replace(".base.", "."): v.clone() for k, v in full.items() if ".lora_" not in k}
    if dist.get_rank() == 0 and folder:
        os.makedirs(folder, exist_ok=True)
        torch.save(plain, os.path.join(folder, f"release_{step}.pt"))
    return plain
