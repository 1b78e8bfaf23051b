from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


@dataclass
class Peer:
    """A network with everything that trains it. `Stateful` for torch.distributed.checkpoint."""

    name: str
    net: torch.nn.Module
    optim: torch.optim.Optimizer
    sched: Any
    wins: int = 0
    loss: float = field(default=0.0)

    def state_dict(self):
        model, optim = get_state_dict(self.net, self.optim)
        return {"model": model, "optim": optim, "sched": self.sched.state_dict(), "wins": self.wins}

    def load_state_dict(self, state):
        set_state_dict(self.net, self.optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.sched.load_state_dict(state["sched"])
        self.wins = state["wins"]


class Clock:
    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]
