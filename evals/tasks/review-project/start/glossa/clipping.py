"""Clipping by the norm of all gradients."""

from __future__ import annotations

import math

import torch
from torch import nn

from . import comm
from .parallel import local


@torch.no_grad()
def clip(model: nn.Module, most: float, sharded: bool) -> float:
    """The norm before clipping.

    A shard's squares are added up here and over the ranks: every element of a gradient is on one rank. In one process there is nothing
    to add. Tied weights come once, since `parameters` names each parameter once.
    """
    grads = [local(p.grad) for p in model.parameters() if p.grad is not None]
    squares = sum(grad.double().square().sum().item() for grad in grads)
    if sharded:
        [squares] = comm.total(squares)
    norm = math.sqrt(squares)
    if norm > most:
        for grad in grads:
            grad.mul_(most / norm)
    return norm
