"""Errors of the probe itself: recorded, and the script goes on as if the probe had not been there. Imports no torch."""

from __future__ import annotations

import traceback

from ..errors import text_of
from ..trace.events import ProbeError
from ..trace.origin import place_in_ours
from ..trace.writer import Writer

_MOST = 20  # different errors of one subscriber
_OF_THE_DEVICE = "CUDA error"  # asynchronous: an operation of the script's may have failed, and nothing works after it


class Guard:
    """Records errors of the probe, each text of a symbol once."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._seen: dict[str, set[str]] = {}

    def report(self, symbol: str, error: BaseException) -> None:
        """Record an error of ours in `symbol`. Raises only an error of the device, which nothing survives."""
        text = text_of(error)
        if _OF_THE_DEVICE in text:
            raise error
        symbol = getattr(error, "symbol", symbol)  # the name of torch that is missing
        seen = self._seen.setdefault(symbol, set())
        if text in seen or len(seen) >= _MOST:
            return
        seen.add(text)
        try:
            self._writer.write(ProbeError(symbol=symbol, text=text, where=place_in_ours(error)))
        except Exception:
            traceback.print_exc()
