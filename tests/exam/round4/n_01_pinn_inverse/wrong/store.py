import os
import re

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def newest(root):
    found = [(int(m.group(1)), d) for d in os.listdir(root) if (m := re.fullmatch(r"step_(\d+)", d))]
    return os.path.join(root, max(found)[1])


def save(root, step, net, opt, physics, popt):
    m, o = get_state_dict(net, opt)
    pm, po = get_state_dict(physics, popt)
    dcp.save({"net": m, "opt": o, "physics": pm, "popt": po, "step": step},
             checkpoint_id=os.path.join(root, f"step_{step:05d}"))


def load(root, net, opt, physics, popt):
    m, o = get_state_dict(net, opt)
    pm, po = get_state_dict(physics, popt)
    sd = {"net": m, "opt": o, "physics": pm, "popt": po, "step": 0}
    dcp.load(sd, checkpoint_id=newest(root))
    set_state_dict(net, opt, model_state_dict=sd["net"], optim_state_dict=sd["opt"])
    set_state_dict(physics, popt, model_state_dict=sd["physics"], optim_state_dict=sd["popt"])
    return sd["step"]
