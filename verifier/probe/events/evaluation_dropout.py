"""Dropouts that are active while a model evaluates: in eval mode and without gradients."""

import sys

import torch
from torch import nn

from ...trace.events import DroppedInEvaluation
from ..session import Session
from .precision import watch_dropouts

_MODULES = "torch/nn/modules/dropout.py"


def install(session: Session) -> None:
    """Subscribe to the dropouts and to the calls within which they are."""
    evaluates = False  # whether the module that the script has called last is in eval mode

    def called(module: nn.Module, given: object) -> None:
        nonlocal evaluates
        evaluates = not module.training

    def dropped(given: torch.Tensor) -> None:
        progress = session.progress
        if not evaluates or torch.is_grad_enabled() or progress.in_backward or not progress.depth:
            return
        if not _of_a_module() and session.first("dropped in evaluation"):
            session.write(DroppedInEvaluation(step=progress.step_number(), at_line=session.here()))

    session.subscribe("call", called)
    watch_dropouts(session, dropped)


def _of_a_module() -> bool:
    """Whether a dropout is that of an `nn.Dropout`, which is active only where somebody has set it
    to training mode: Monte Carlo dropout.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_back is not None:
        if frame.f_code.co_filename.replace("\\", "/").endswith(_MODULES):
            return True
        frame = frame.f_back
    return False
