"""Coarse to fine: each stage adds a level and trains it alone; the last one trains everything with a small step."""
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Stage:
    until: int
    active: int
    trainable: tuple
    lr: float


PLAN = (Stage(8, 1, (0,), 0.1), Stage(16, 2, (1,), 0.1), Stage(24, 3, (2,), 0.1), Stage(32, 3, (0, 1, 2), 0.03))


def stage_of(step):
    return next(i for i, s in enumerate(PLAN) if step < s.until)


def enter(model, index):
    """Set the levels of a stage and give its optimizer."""
    stage = PLAN[index]
    model.active = stage.active
    for i, level in enumerate(model.levels):
        level.requires_grad_(i in stage.trainable)
    model.base.requires_grad_(0 in stage.trainable)
    live = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return torch.optim.SGD(live.values(), lr=stage.lr, momentum=0.9), live
