"""Schedules of the learning rate, as a factor of each step. All begin with a linear warm-up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass
class ScheduleSettings:
    kind: str = "cosine"
    warmup: int = 0
    steps: int = 100  # the optimizer step at which the decay has ended
    least: float = 0.1  # the factor at the end
    hold: float = 0.8  # wsd: the part of the steps before the decay
    drops: list[int] = ()  # step: where the factor is divided by ten


def warmed(step: int, settings: ScheduleSettings) -> float:
    """From 1 / warmup to 1."""
    return min(1.0, (step + 1) / settings.warmup) if settings.warmup else 1.0


def progress(step: int, settings: ScheduleSettings) -> float:
    """The part of the steps after the warm-up that are done."""
    span = max(settings.steps - settings.warmup, 1)
    return min(max(step - settings.warmup, 0) / span, 1.0)


def constant(step: int, settings: ScheduleSettings) -> float:
    return 1.0


def cosine(step: int, settings: ScheduleSettings) -> float:
    falling = 0.5 * (1 + math.cos(math.pi * progress(step, settings)))
    return settings.least + (1 - settings.least) * falling


def linear(step: int, settings: ScheduleSettings) -> float:
    return 1 - (1 - settings.least) * progress(step, settings)


def wsd(step: int, settings: ScheduleSettings) -> float:
    """Warm-up, stable, decay: constant for most of the run, then down along a square root."""
    done = progress(step, settings)
    if done <= settings.hold:
        return 1.0
    part = (done - settings.hold) / max(1 - settings.hold, 1e-9)
    return 1 - (1 - settings.least) * math.sqrt(part)


def inverse_sqrt(step: int, settings: ScheduleSettings) -> float:
    return math.sqrt(max(settings.warmup, 1) / max(step + 1, settings.warmup, 1))


def step(step: int, settings: ScheduleSettings) -> float:
    return 0.1 ** sum(step >= drop for drop in settings.drops)


KINDS: dict[str, Callable[[int, ScheduleSettings], float]] = {
    "constant": constant,
    "cosine": cosine,
    "linear": linear,
    "wsd": wsd,
    "inverse_sqrt": inverse_sqrt,
    "step": step,
}


def factor(step: int, settings: ScheduleSettings) -> float:
    return warmed(step, settings) * KINDS[settings.kind](step, settings)


def make(optimizer: torch.optim.Optimizer, settings: ScheduleSettings) -> torch.optim.lr_scheduler.LambdaLR:
    """To be stepped once after each optimizer step."""
    if settings.kind not in KINDS:
        raise ValueError(f"schedule.kind: {settings.kind} is none of {', '.join(KINDS)}")
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step, settings))
