"""Records errors of the probe itself; the script goes on as without the probe. Imports no torch."""

import traceback

from ..errors import text_of
from ..trace.events import ProbeError
from ..trace.origin import place_in_ours
from ..trace.writer import Writer

_MOST = 20  # different errors of one subscriber
# asynchronous: an operation of the script may have failed, and no later one works
_OF_THE_DEVICE = "CUDA error"


class ProbeErrors:
    """Records errors of the probe, each text of a symbol once."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._seen: dict[str, set[str]] = {}

    def report(self, symbol: str, error: BaseException) -> None:
        """Record an error of the probe in `symbol`.

        Raises only an error of the device, which ends the run.
        """
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
