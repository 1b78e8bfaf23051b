"""only what is trained goes to disk: adapters, their optimizer state and the step"""

from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from lora import trainable


def save(folder, step, model, optimizer):
    state = {
        "adapters": {n: p.detach() for n, p in trainable(model).items()},
        "optim": get_optimizer_state_dict(model, optimizer, options=StateDictOptions(ignore_frozen_params=True)),
        "step": step,
    }
    dcp.save(state, checkpoint_id=str(Path(folder) / f"{step:06d}"))


def load_newest(folder, model, optimizer):
    path = sorted(p for p in Path(folder).iterdir() if p.name.isdigit())[-1]
    options = StateDictOptions(ignore_frozen_params=True)
    state = {
        "adapters": {n: p.detach() for n, p in trainable(model).items()},  # filled in place
        "optim": get_optimizer_state_dict(model, optimizer, options=options),
        "step": 0,
    }
    dcp.load(state, checkpoint_id=str(path))
    set_optimizer_state_dict(model, optimizer, state["optim"], options=options)
    return state["step"]
