"""Streams and events: all work is done in the order in which it is called, so there is nothing to
wait for.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from ...session import Session
from ._answers import always, answer
from .marks import CPU, device_from


class Stream:
    """A stream, which does its work at once."""

    def __init__(self, device: Any = None, priority: int = 0, **more: Any) -> None:
        self.device = device_from("cuda" if device is None else device) or CPU
        self.priority, self.stream_id, self.cuda_stream = priority, id(self), id(self)
        self.device_index, self.device_type = self.device.index, 1

    def __enter__(self) -> "Stream":
        _entered.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _entered.pop()

    def wait_stream(self, stream: Any) -> None:
        """Nothing is to be waited for."""

    def wait_event(self, event: Any) -> None:
        """Nothing is to be waited for."""

    def synchronize(self) -> None:
        """All is done."""

    def query(self) -> bool:
        """Whether all is done."""
        return True

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is captured."""
        return False

    def record_event(self, event: Any = None) -> "Event":
        """An event that has happened."""
        found: Event = Event() if event is None else event
        return found.record()

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The least and the greatest priority."""
        return 0, -5


class Event:
    """A moment of this process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._at: float | None = None

    def record(self, stream: Any = None) -> "Event":
        """It happens now."""
        self._at = time.perf_counter()
        return self

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds between two events."""
        if self._at is None or end._at is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end._at - self._at) * 1000

    def wait(self, stream: Any = None) -> None:
        """Nothing is to be waited for."""

    def synchronize(self) -> None:
        """All is done."""

    def query(self) -> bool:
        """Whether it has happened."""
        return True


class _Within:
    """`torch.cuda.stream(stream)`: a stream, or none, for a while."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            _entered.append(self.stream)

    def __exit__(self, *error: object) -> None:
        if self.stream is not None:
            _entered.pop()


_entered: list[Stream] = []
_numbers: dict[int, int] = {}
_defaults: dict[Any, Stream] = {}


def _default(device: Any = None) -> Stream:
    found = device_from("cuda" if device is None else device)
    return _defaults.setdefault(found, Stream(found))


def _current(device: Any = None) -> Stream:
    return _entered[-1] if _entered else _default(device)


def number() -> int:
    """That of the current stream: 0 for the default one, else its own, in the order of their first
    use.
    """
    return _numbers.setdefault(id(_entered[-1]), len(_numbers) + 1) if _entered else 0


def _set(stream: Stream) -> None:
    _entered[:] = [stream]


def install(session: Session) -> None:
    """Give `torch.cuda`, `torch.accelerator` and `torch` these streams and events."""
    for module in (torch.cuda, torch.cuda.streams, torch):
        module.Stream, module.Event = Stream, Event  # type: ignore[attr-defined]
    torch.cuda.StreamContext = _Within  # type: ignore[assignment, misc]
    answers: dict[str, Callable[..., Any]] = {
        "current_stream": _current,
        "default_stream": _default,
        "set_stream": _set,
        "stream": _Within,
    }
    answer(session, "torch.cuda", answers)
    answer(session, "torch.accelerator", answers)
    answer(session, "torch", {"Tensor.record_stream": always(None)})
