"""What is done with gradients between backward and the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from .parallel import local


def norms(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """The norm of each gradient that there is."""
    return torch.stack([local(p.grad).norm() for p in parameters if p.grad is not None])


def total_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """The norm of all gradients as one vector."""
    return norms(parameters).norm()


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], most: float) -> float:
    """Scale the gradients so that their norm is no more than `most`; the norm that they had."""
    parameters = list(parameters)
    norm = total_norm(parameters)
    factor = (most / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            local(parameter.grad).mul_(factor)
    return norm.item()


def centralise(parameters: Iterable[nn.Parameter]) -> None:
    """Gradient centralisation (Yong et al. 2020): each row of a matrix's gradient gets mean zero."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.ndim == 2:
            grad = local(parameter.grad)
            grad.sub_(grad.mean(dim=1, keepdim=True))
