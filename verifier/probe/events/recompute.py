"""Activation checkpointing: whether a recomputed forward draws the random numbers of the first one.

The generator's state at every active dropout of a forward is remembered; a dropout that runs in a backward is a recompute
and must meet one of these states.
"""

from __future__ import annotations

import functools

import torch

from ...trace.events import Recompute
from ..dispatcher import Call
from ..frames import caller
from ..session import Session
from .precision import DROPOUTS, is_active

_REMEMBERED = 1 << 16
_MULTIPLY = 0x9E3779B97F4A7C15 - (1 << 64)


def install(session: Session) -> None:
    """Subscribe to the dropouts; where they are off there is nothing to draw."""
    if session.request["full_precision"]:
        return
    watch = _Watch(session)
    for name, (key, position) in DROPOUTS.items():
        session.dispatcher.around(
            f"torch.nn.functional:{name}", before=functools.partial(watch.dropped, key=key, position=position)
        )


class _Watch:
    """The states that forwards have met, and what was recorded of recomputes."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._met: dict[int, None] = {}  # in order: the oldest are forgotten first
        self._recorded: set[bool] = set()

    def dropped(self, call: Call, key: str, position: int) -> None:
        """A dropout is called."""
        if not is_active(call, key, position):
            return
        state = _state(call.given(0, "input" if key == "p" else "query").device.type)
        if not self._session.in_backward:
            self._met[state] = None
            if len(self._met) > _REMEMBERED:
                del self._met[next(iter(self._met))]
            return
        same = state in self._met
        if same in self._recorded:
            return
        self._recorded.add(same)
        code = caller().f_code
        place = f"{code.co_filename.rpartition('/')[2]}, {code.co_qualname}"
        self._session.write(Recompute(same=same, place=place, at_line=self._session.here()))


def _state(device: str) -> int:
    state = (torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()).view(torch.int64)
    odd = 2 * torch.arange(state.numel()) + 1
    return int((((state ^ (state >> 29)) * odd) * _MULTIPLY).sum())
