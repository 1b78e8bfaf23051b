"""One plain file per checkpoint, written by rank 0, readable by any number of ranks."""
import glob
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict


def save(folder, step, samples, model, opt):
    # every rank takes part in gathering, rank 0 ends up with the result
    msd, osd = get_state_dict(model, opt, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        final = os.path.join(folder, f"state-{step:07d}.pt")
        torch.save({"model": msd, "optim": osd, "step": step, "samples": samples}, final + ".part")
        os.replace(final + ".part", final)
        for old in sorted(glob.glob(os.path.join(folder, "state-*.pt")))[:-4]:
            os.remove(old)
    dist.barrier()


def load(folder, model, opt):
    # every rank reads the file and keeps its own part of each tensor
    blob = torch.load(max(glob.glob(os.path.join(folder, "state-*.pt"))), map_location="cpu", weights_only=True)
    set_state_dict(model, opt, model_state_dict=blob["model"], optim_state_dict=blob["optim"],
                   options=StateDictOptions(full_state_dict=True))
    return blob["step"], blob["samples"]
