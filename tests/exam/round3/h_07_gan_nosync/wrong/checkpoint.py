import os

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def collect(nets, opts, step):
    out = {"step": step}
    for name in nets:
        m, o = get_state_dict(nets[name], opts[name])
        out[name] = {"model": m, "opt": o}
    return out


def save(folder, nets, opts, step):
    dcp.save(collect(nets, opts, step), checkpoint_id=os.path.join(folder, f"it{step:06d}"))


def load(folder, nets, opts):
    state = collect(nets, opts, 0)
    dcp.load(state, checkpoint_id=os.path.join(folder, sorted(os.listdir(folder))[-1]))
    for name in nets:
        set_state_dict(
            nets[name], opts[name], model_state_dict=state[name]["model"], optim_state_dict=state[name]["opt"]
        )
    return state["step"]
