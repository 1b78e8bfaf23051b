"""Activation checkpointing: whether a recomputed forward draws the random numbers of the first one.

The generator's state at every active dropout and every other draw of a forward is stored; a dropout
that runs in a backward, and a draw in a forward that a backward recomputes, must start from one of
these states.
"""

import hashlib
import sys
import types

import torch

from ...trace.events import Recompute
from ..dispatcher import Call
from ..frames import caller
from ..session import Session
from .precision import watch_dropouts
from .randomness import FUNCTIONS

_REMEMBERED = 1 << 16


def install(session: Session) -> None:
    """Subscribe to the dropouts, unless the run switches them off."""
    progress = session.progress
    met: dict[int, None] = {}  # states of forwards, oldest first

    def met_again(state: int, again: bool) -> None:
        if not again:
            met[state] = None
            if len(met) > _REMEMBERED:
                del met[next(iter(met))]
        elif session.first(("recompute", state in met)):
            code = caller().f_code
            place = f"{code.co_filename.rpartition('/')[2]}, {code.co_qualname}"
            session.write(Recompute(same=state in met, place=place, at_line=session.here()))

    def dropped(given: torch.Tensor) -> None:
        met_again(_state(given.device.type), progress.in_backward)

    def drawn(call: Call) -> None:
        """Not every draw in a backward is recomputed: a hook may add noise to gradients."""
        # read once: a thread that loads data draws while it changes
        again = progress.in_backward
        # Not every draw in a backward is recomputed: a hook may add noise to gradients (SGLD,
        # privacy).
        if _recomputed() if again else progress.depth > 0:
            given, like = call.kwargs.get("generator"), call.given(0, "input")
            device = call.kwargs.get("device") or (
                like.device if isinstance(like, torch.Tensor) else "cpu"
            )
            met_again(
                (
                    hashed(given.get_state())
                    if given is not None
                    else _state(torch.device(device).type)
                ),
                again,
            )

    if not session.request.full_precision:
        watch_dropouts(session, dropped)
        for target in FUNCTIONS:
            session.around(target, before=drawn)


def _recomputed() -> bool:
    """Whether the code that runs was called by torch's activation checkpointing."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
            return True
        frame = frame.f_back
    return False


def _state(device: str) -> int:
    return hashed(torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state())


def hashed(generator: torch.Tensor) -> int:
    """A number for the state of a generator. A sum over its words missed the 24 draws between two
    states: the words that count draws cancelled each other (a seed in an evaluation every 25
    steps).
    """
    digest = hashlib.blake2b(generator.numpy().tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
