import os
import re

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def save(root, step, model, optim, data_gen):
    folder = os.path.join(root, f"step{step}")
    os.makedirs(folder, exist_ok=True)
    weights = get_model_state_dict(model, options=FULL)
    if dist.get_rank() == 0:
        torch.save({"model": weights, "step": step, "data_gen": data_gen.get_state()}, os.path.join(folder, "model.pt"))
    torch.save(optim.state_dict(), os.path.join(folder, f"optim{dist.get_rank()}.pt"))
    dist.barrier()


def load(root, model, optim, data_gen):
    steps = [int(m.group(1)) for m in (re.fullmatch(r"step(\d+)", n) for n in os.listdir(root)) if m]
    folder = os.path.join(root, f"step{max(steps)}")
    ck = torch.load(os.path.join(folder, "model.pt"))
    set_model_state_dict(model, ck["model"], options=StateDictOptions(full_state_dict=True))
    optim.load_state_dict(torch.load(os.path.join(folder, f"optim{dist.get_rank()}.pt")))
    data_gen.set_state(ck["data_gen"])
    return ck["step"]
