"""Events and those who listen to them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

NAMES = ("begin", "step", "skip", "validation", "end")
Listener = Callable[..., None]


class Events:
    """Listeners are called in the order in which they came, on every rank."""

    def __init__(self) -> None:
        self.listeners: dict[str, list[Listener]] = defaultdict(list)

    def on(self, name: str) -> Callable[[Listener], Listener]:
        """A decorator."""
        if name not in NAMES:
            raise ValueError(f"no event {name}; there are {', '.join(NAMES)}")

        def register(listener: Listener) -> Listener:
            self.listeners[name].append(listener)
            return listener

        return register

    def say(self, name: str, **what: Any) -> None:
        for listener in self.listeners[name]:
            listener(**what)
