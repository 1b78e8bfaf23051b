import os

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict


def tree(run):
    m, o = get_state_dict(run.student, run.look.opt)
    out = {"student": m, "opt": o, "slow": {str(i): s for i, s in enumerate(run.look.slow)}}
    if run.teacher is not None:
        out["teacher"] = get_model_state_dict(run.teacher)
    return out


def save(root, run):
    state = {**tree(run), "count": run.look.count}
    dcp.save(state, checkpoint_id=os.path.join(root, f"g{run.generation:02d}_s{run.step:05d}"))


def newest(root):
    """(folder, generation, step): the place in the program comes from the name, because the networks must exist before loading."""
    name = max(d for d in os.listdir(root) if d.startswith("g"))
    g, s = name.split("_")
    return os.path.join(root, name), int(g[1:]), int(s[1:])


def load(folder, run):
    state = {**tree(run), "count": 0}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(run.student, run.look.opt, model_state_dict=state["student"], optim_state_dict=state["opt"])
    if run.teacher is not None:
        set_model_state_dict(run.teacher, state["teacher"])
    run.look.count = state["count"]
