import os
import re

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict


def collect(gan):
    """Everything a run needs to go on, as one nested state dict."""
    return {
        "gen": get_model_state_dict(gan.gen),
        "disc": get_model_state_dict(gan.disc),
        "opt_gen": gan.opt_gen.state_dict(),
        "opt_disc": gan.opt_disc.state_dict(),
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
    gan.opt_gen.load_state_dict(state["opt_gen"])
    gan.opt_disc.load_state_dict(state["opt_disc"])
    gan.step = state["step"]
    return name
