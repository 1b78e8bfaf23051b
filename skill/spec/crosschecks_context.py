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
    "parallel.dp_replicate": 1,
    "model.window": None,
    "model.experts": None,
    "memory.chunked_loss": False,
    "memory.compile": False,
    "parallel.cpu_offload": False,
    "precision.fp8": False,
    "finetune.kind": "full",
    "checkpoint.generate": False,
}
WORDS = {None: "left out", False: "false"}


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


@needs("parallel.cp", "optimizer.kind")
def context_parallelism_has_optimizers(values: Values, cp: int, kind: str) -> Iterator[Fault]:
    if cp > 1 and kind == "muon":
        yield fault("optimizer.kind", f"must be another one with parallel.cp {cp}, found {kind!r}")


@needs("parallel.cp", "memory.activation_checkpointing")
def context_parallelism_recomputes_blocks(values: Values, cp: int, kind: str) -> Iterator[Fault]:
    """Measured on 2.13.0: under the dispatch mode of op-selective checkpointing
    `causal_lower_right` raises.
    """
    if cp > 1 and kind == "op-selective":
        message = f"must be none or full with parallel.cp {cp}, found {kind!r}"
        yield fault("memory.activation_checkpointing", message)


@needs("parallel.cp", "data.packing", "data.kind")
def context_parallelism_has_no_documents(
    values: Values, cp: int, packing: Any, kind: str
) -> Iterator[Fault]:
    if cp > 1 and (packing == "documents" or (kind == "chat" and packing is True)):
        shown = repr(packing) if isinstance(packing, str) else "true"
        yield fault("data.packing", f"must be false with parallel.cp {cp}, found {shown}")


@needs("parallel.cp", "parallel.reshard_after_forward")
def context_parallelism_reshards_whole(values: Values, cp: int, reshard: Any) -> Iterator[Fault]:
    if cp > 1 and not isinstance(reshard, bool):
        key = "parallel.reshard_after_forward"
        yield fault(key, f"must be true or false with parallel.cp {cp}, found {reshard}")


def _alone(key: str, only: Any) -> None:
    @needs("parallel.cp", key)
    def context_parallelism_alone(values: Values, cp: int, found: Any) -> Iterator[Fault]:
        if cp > 1 and found != only:
            shown = "true" if found is True else repr(found)
            seen = "" if isinstance(found, dict) else f", found {shown}"
            yield fault(key, f"must be {WORDS.get(only, only)} with parallel.cp {cp}{seen}")


for _key, _only in ALONE.items():
    _alone(_key, _only)
