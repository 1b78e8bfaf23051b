"""The detectors by the name of their rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..finding import Hit
from .events import Flow

Detector = Callable[[Flow], Iterator[Hit]]
DETECTORS: dict[str, list[Detector]] = {}


def detector(rule: str) -> Callable[[Detector], Detector]:
    """Register a function that yields the hits of a rule in one flow."""

    def register(function: Detector) -> Detector:
        DETECTORS.setdefault(rule, []).append(function)
        return function

    return register
