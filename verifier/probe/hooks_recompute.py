"""Activation checkpointing: whether a recomputed forward draws the random numbers of the first one.

The generator's state at every active dropout of a forward is remembered; a dropout that runs in a backward is a recompute
and must meet one of these states.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .session import Session

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
MEMORY = 1 << 16


def install(session: Session) -> None:
    """Listen to the dropouts of this process. Call it after what else replaces them."""
    watch = _Watch(session)
    for name in DROPOUTS:
        setattr(F, name, watch.heard(getattr(F, name), "p", 1))
    F.scaled_dot_product_attention = watch.heard(F.scaled_dot_product_attention, "dropout_p", 4)


class _Watch:
    """The states that forwards have met, and what has been told of recomputes."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._met: dict[int, None] = {}  # in order: the oldest are forgotten first
        self._told: set[bool] = set()

    def heard(self, real: Callable[..., Any], key: str, position: int) -> Callable[..., Any]:
        """`real`, with its active calls noted."""

        @functools.wraps(real)
        def dropped(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._session.request["exact"]:
                return real(*args, **kwargs)
            rate = args[position] if len(args) > position else kwargs.get(key, 0.5 if key == "p" else 0.0)
            on = key != "p" or (args[2] if len(args) > 2 else kwargs.get("training", True))
            if rate and on:
                self._note(args[0].device.type)
            return real(*args, **kwargs)

        return dropped

    def _note(self, device: str) -> None:
        state = _state(device)
        if not self._session.in_backward:
            self._met[state] = None
            if len(self._met) > MEMORY:
                del self._met[next(iter(self._met))]
            return
        same = state in self._met
        if same in self._told:
            return
        self._told.add(same)
        caller = sys._getframe(2).f_code
        place = f"{caller.co_filename.rpartition('/')[2]}, {caller.co_qualname}"
        recorder = self._session.recorder
        recorder.write("recompute", same=same, place=place, at_line=recorder.here())


def _state(device: str) -> int:
    state = (torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()).view(torch.int64)
    odd = 2 * torch.arange(state.numel()) + 1
    return int((((state ^ (state >> 29)) * odd) * _MULTIPLY).sum())


_MULTIPLY = 0x9E3779B97F4A7C15 - (1 << 64)
