"""Errors of the probe itself: recorded as `probe_error`, and the script goes on as if the probe had not been there. Imports no torch."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any

from ..errors import text_of
from ..origin import place_in_ours
from .recorder import Recorder

_MOST = 20  # different errors of one hook
_OF_THE_DEVICE = "CUDA error"  # asynchronous: an operation of the script's may have failed, and nothing works after it


def record_error(recorder: Recorder, what: str, error: BaseException) -> None:
    """Record an error of ours in the hook `what`. Never raises."""
    try:
        recorder.write("probe_error", what=what, error=text_of(error), where=place_in_ours(error))
    except Exception:
        traceback.print_exc()


def guarded(recorder: Recorder, what: str, hook: Callable[..., None]) -> Callable[..., None]:
    """`hook`, whose own errors are recorded, each text once, and do not reach the script."""
    seen: set[str] = set()

    @functools.wraps(hook)
    def tried(*args: Any, **kwargs: Any) -> None:
        try:
            hook(*args, **kwargs)
        except Exception as error:
            text = text_of(error)
            if _OF_THE_DEVICE in text:
                raise
            if text not in seen and len(seen) < _MOST:
                seen.add(text)
                record_error(recorder, what, error)

    return tried


def guard_methods(recorder: Recorder, target: Any, names: tuple[str, ...]) -> None:
    """Let these methods of an object be `guarded`."""
    for name in names:
        setattr(target, name, guarded(recorder, name, getattr(target, name)))
