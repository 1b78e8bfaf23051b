"""Activation checkpointing: whether a recomputed forward draws the random numbers of the first one.

The generator's state at every active dropout of a forward is stored; a dropout that runs in a backward is a recompute
and must start from one of these states.
"""

import torch

from ...trace.events import Recompute
from ..frames import caller
from ..session import Session
from .precision import watch_dropouts

_REMEMBERED = 1 << 16
_MULTIPLY = 0x9E3779B97F4A7C15 - (1 << 64)


def install(session: Session) -> None:
    """Subscribe to the dropouts, unless the run switches them off."""
    met: dict[int, None] = {}  # states of forwards, oldest first

    def dropped(given: torch.Tensor) -> None:
        state = _state(given.device.type)
        if not session.in_backward:
            met[state] = None
            if len(met) > _REMEMBERED:
                del met[next(iter(met))]
        elif session.first(("recompute", state in met)):
            code = caller().f_code
            place = f"{code.co_filename.rpartition('/')[2]}, {code.co_qualname}"
            session.write(Recompute(same=state in met, place=place, at_line=session.here()))

    if not session.request["full_precision"]:
        watch_dropouts(session, dropped)


def _state(device: str) -> int:
    state = (torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()).view(torch.int64)
    odd = 2 * torch.arange(state.numel()) + 1
    return int((((state ^ (state >> 29)) * odd) * _MULTIPLY).sum())
