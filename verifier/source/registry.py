"""The detectors by the name of their rule: each yields its hits in one flow."""

from collections.abc import Callable, Iterator

from ..finding import Hit
from .events import Flow

DETECTORS: dict[str, Callable[[Flow], Iterator[Hit]]] = {}
