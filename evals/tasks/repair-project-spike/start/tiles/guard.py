"""Keeps a bad batch from doing harm."""

from __future__ import annotations

from typing import Any

from .meters import Window


class Guard:
    """Says of each loss whether its step should be made. The losses of steps that were made are what it compares with.

    As long as it does not know enough losses it lets all of them pass.
    """

    def __init__(self, window: int, factor: float) -> None:
        self.factor = factor
        self.window = Window(window) if window else None
        self.skipped = 0

    def allows(self, loss: float) -> bool:
        if self.window is None:
            return True
        if self.window.full and loss > self.factor * self.window.median():
            self.skipped += 1
            return False
        self.window.add(loss)
        return True

    def state_dict(self) -> dict[str, Any]:
        known = self.window.state_dict() if self.window else {}
        return {"skipped": self.skipped, **known}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped = state["skipped"]
        if self.window:
            self.window.load_state_dict({"values": state["values"]})
