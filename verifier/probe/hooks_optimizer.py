"""Listening to what an optimizer's step asks of a DTensor: its shard."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..origin import within_torch
from .session import Session


def install(session: Session) -> None:
    """Note the first `to_local()` that an optimizer's own code asks for within its step."""
    if session.stand_in:
        return
    to_local = DTensor.to_local
    heard = False

    @functools.wraps(to_local)
    def asked(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal heard
        if torch.compiler.is_compiling() or heard or not session.in_step:
            return to_local(self, *args, **kwargs)
        by_torch = within_torch(sys._getframe(1).f_code.co_filename)
        if not by_torch:
            heard = True
            place = session.recorder.here()
            session.recorder.write("shard_in_step", at_line=place)
        return to_local(self, *args, **kwargs)

    DTensor.to_local = asked  # type: ignore[method-assign]
