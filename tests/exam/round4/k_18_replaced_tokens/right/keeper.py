"""Checkpoints of several models and optimizers in one file; the newest one wins."""
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Keeper:
    def __init__(self, pairs):
        self.pairs = pairs       # {name: (model, optimizer)}

    def save(self, folder, step):
        parts = {}
        for name, (m, o) in self.pairs.items():
            parts[name] = get_state_dict(m, o, options=FULL)
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
            ms, os_ = ck["parts"][name]
            set_state_dict(m, o, model_state_dict=ms, optim_state_dict=os_, options=FULL)
        return ck["step"]
