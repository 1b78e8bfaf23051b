"""What context parallelism divides, and what it is not combined with: only what was run is
allowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...verifier.config.reading.validation import Fault
from .crosschecks import Values, fault, needs

ALONE: dict[str, Any] = {  # the one value that each of these keys may have
    "parallel.tp": 1,
    "memory.compile": False,
}


@needs("parallel.cp", "model.kind")
def context_parallelism_is_of_the_decoder(values: Values, cp: int, kind: str) -> Iterator[Fault]:
    if cp > 1 and kind != "decoder":
        message = (
            f"must be 1 for model.kind {kind}: only the attention of the decoder gathers keys and"
            " values"
        )
        yield fault("parallel.cp", f"{message}, found {cp}")


@needs("parallel.cp", "model.sequence_length")
def context_parallelism_divides(values: Values, cp: int, length: int) -> Iterator[Fault]:
    if cp > 1 and length % (2 * cp):
        message = (
            f"must be a multiple of 2 x parallel.cp {cp} (each rank has two chunks), found {length}"
        )
        yield fault("model.sequence_length", message)


def _alone(key: str, only: Any) -> None:
    @needs("parallel.cp", key)
    def context_parallelism_alone(values: Values, cp: int, found: Any) -> Iterator[Fault]:
        if cp > 1 and found != only:
            shown = "true" if found is True else repr(found)
            yield fault(key, f"must be {str(only).lower()} with parallel.cp {cp}, found {shown}")


for _key, _only in ALONE.items():
    _alone(_key, _only)
