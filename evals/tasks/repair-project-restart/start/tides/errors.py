"""Errors on the held-out windows."""

from __future__ import annotations

import math

import torch
from torch import nn

from . import comm
from .meters import Meters
from .series import split


@torch.no_grad()
def errors(model: nn.Module, held_out: torch.Tensor, past: int) -> dict[str, float]:
    """Mean squared and mean absolute error over all windows and hours, the same on every rank.

    Each rank takes its windows. Some ranks may have one less: they take one of their windows again, so that all of them make one
    forward, and do not count it.
    """
    each = math.ceil(len(held_out) / comm.world())
    index = torch.arange(comm.rank(), each * comm.world(), comm.world())
    counted = (index < len(held_out)).float()[:, None]
    known, right = split(held_out[index.clamp(max=len(held_out) - 1)], past)
    model.eval()
    wrong = (model(known) - right) * counted
    model.train()
    meters = Meters("mse", "mae")
    meters.add(counted.sum() * right.shape[1], mse=wrong.square().sum(), mae=wrong.abs().sum())
    return meters.over_ranks()
