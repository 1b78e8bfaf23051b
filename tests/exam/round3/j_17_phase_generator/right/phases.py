"""A fine-tuning plan: which parts learn, for how long, and with which optimizer."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Phase:
    name: str
    steps: int
    parts: tuple
    lr: float
    kind: str = "adamw"


PLAN = (
    Phase("head", 7, ("head",), 1e-2),
    Phase("top", 8, ("head", "top"), 5e-3),
    Phase("all", 9, ("head", "top", "bottom"), 2e-2, "sgd"),
)


def locate(step):
    """(phase, step within it) of a global step"""
    for phase in PLAN:
        if step < phase.steps:
            return phase, step
        step -= phase.steps
    return None, 0


def enter(model, phase):
    """Freeze and thaw, and give the new optimizer of the phase."""
    for name, part in model.named_children():
        part.requires_grad_(name in phase.parts)
    live = [p for p in model.parameters() if p.requires_grad]
    if phase.kind == "sgd":
        return torch.optim.SGD(live, lr=phase.lr, momentum=0.9)
    return torch.optim.AdamW(live, lr=phase.lr)
