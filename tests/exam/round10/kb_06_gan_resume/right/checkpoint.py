import os
import re

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (get_model_state_dict, get_optimizer_state_dict,
                                                     set_model_state_dict, set_optimizer_state_dict)


def collect(gan):
    """Everything a run needs to go on, as one nested state dict."""
    return {
        "gen": get_model_state_dict(gan.gen),
        "disc": get_model_state_dict(gan.disc),
        "opt_gen": get_optimizer_state_dict(gan.gen, gan.opt_gen),
        "opt_disc": get_optimizer_state_dict(gan.disc, gan.opt_disc),
        "step": gan.step,
    }


def save(gan, root):
    dcp.save(collect(gan), checkpoint_id=os.path.join(root, f"gan-{gan.step}"))


def load(gan, root):
    found = [m for m in map(re.compile(r"gan-(\d+)$").match, os.listdir(root)) if m]
    name = max(found, key=lambda m: int(m.group(1))).group(0)
    state = collect(gan)
    dcp.load(state, checkpoint_id=os.path.join(root, name))
    set_model_state_dict(gan.gen, state["gen"])
    set_model_state_dict(gan.disc, state["disc"])
    set_optimizer_state_dict(gan.gen, gan.opt_gen, state["opt_gen"])
    set_optimizer_state_dict(gan.disc, gan.opt_disc, state["opt_disc"])
    gan.step = state["step"]
    return name
