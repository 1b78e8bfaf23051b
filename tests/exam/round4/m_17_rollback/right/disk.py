import os

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def _tree(model, opt, control):
    m, o = get_state_dict(model, opt)
    return {"model": m, "optim": o, "control": dict(control)}


def save(out, model, opt, control):
    dcp.save(_tree(model, opt, control), checkpoint_id=os.path.join(out, f"c{control['updates']:05d}"))


def load(folder, model, opt, control):
    tree = _tree(model, opt, control)
    dcp.load(tree, checkpoint_id=os.path.join(folder, max(f for f in os.listdir(folder) if f[0] == "c")))
    set_state_dict(model, opt, model_state_dict=tree["model"], optim_state_dict=tree["optim"])
    control.update(tree["control"])
