from dataclasses import dataclass
from typing import Tuple

import torch


@dataclass(frozen=True)
class Phase:
    name: str
    steps: int
    depth: int
    train: Tuple[int, ...]
    lr: float
    kind: str


PLAN = (
    Phase("level-0", 10, 1, (0,), 3e-3, "adam"),
    Phase("level-1", 10, 2, (1,), 3e-3, "adam"),
    Phase("level-2", 10, 3, (2,), 3e-3, "adam"),
    Phase("joint", 12, 3, (0, 1, 2), 5e-2, "sgd"),
)
TOTAL = sum(p.steps for p in PLAN)


def locate(step):
    """Phase of a global step and the first step of that phase."""
    begin = 0
    for phase in PLAN:
        if step < begin + phase.steps:
            return phase, begin
        begin += phase.steps
    raise ValueError(step)


def enter(phase, net):
    """Sets what is trainable and makes the optimizer of the phase; moments never cross a phase border."""
    chosen = []
    for k, level in enumerate(net.levels):
        level.requires_grad_(k in phase.train)
        if k in phase.train:
            chosen += list(level.parameters())
    if phase.kind == "adam":
        return torch.optim.Adam(chosen, lr=phase.lr, eps=1e-6)
    return torch.optim.SGD(chosen, lr=phase.lr, momentum=0.9)
