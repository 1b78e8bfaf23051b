"""Checkpoints of several models and optimizers in one file; the newest one wins."""
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     set_model_state_dict, set_optimizer_state_dict)

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Keeper:
    def __init__(self, pairs):
        self.pairs = pairs       # {name: (model, optimizer)}

    def save(self, folder, step):
        parts = {}
        for name, (m, o) in self.pairs.items():
            parts[name] = {"model": get_model_state_dict(m, options=FULL)}
            if o.state:
                parts[name]["opt"] = get_optimizer_state_dict(m, o, options=FULL)
        if dist.get_rank() == 0:
            os.makedirs(folder, exist_ok=True)
            target = os.path.join(folder, f"state_{step:06d}.pt")
            torch.save({"step": step, "parts": parts}, target + ".part")
            os.replace(target + ".part", target)
        dist.barrier()

    def load(self, folder):
        names = sorted(n for n in os.listdir(folder) if n.endswith(".pt"))
        ck = torch.load(os.path.join(folder, names[-1]), map_location="cpu")
        for name, (m, o) in self.pairs.items():
            set_model_state_dict(m, ck["parts"][name]["model"], options=FULL)
            if "opt" in ck["parts"][name]:
                set_optimizer_state_dict(m, o, ck["parts"][name]["opt"], options=FULL)
        return ck["step"]
