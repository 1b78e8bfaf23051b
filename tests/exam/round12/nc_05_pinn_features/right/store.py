import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def save(folder, step, net, opt):
    model, optim = get_state_dict(net, opt, options=FULL)
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        torch.save({"model": model, "optim": optim, "step": step}, os.path.join(folder, f"{step:05d}.pt"))
    dist.barrier()


def load(folder, net, opt):
    blob = torch.load(os.path.join(folder, sorted(os.listdir(folder))[-1]))
    set_state_dict(net, opt, model_state_dict=blob["model"], optim_state_dict=blob["optim"], options=FULL)
    return blob["step"]
