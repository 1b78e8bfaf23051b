"""`parallel.reshard_after_forward` as a list: a value for each block, or for several in a row."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from ...verifier.config.reading.validation import Fault
from .crosschecks import Values, fault, needs

KEY = "parallel.reshard_after_forward"
REST = "rest"
Run = tuple[int | str, bool | int]  # so many blocks, or `rest`, and their value


def runs(written: Any) -> list[Run]:
    """The list as runs of blocks; neighbours of one value are one run, unless one of them is the
    rest.
    """
    items = [
        (item["blocks"], item["reshard"]) if isinstance(item, dict) else (1, item)
        for item in written
    ]
    joined: list[Run] = []
    for (value, _, is_rest), group in groupby(
        items, key=lambda run: (run[1], type(run[1]), run[0] == REST)
    ):
        joined += [(REST, value)] if is_rest else [(sum(int(blocks) for blocks, _ in group), value)]
    return joined


def numbers(written: Any) -> list[int]:
    """The numbers of ranks among the values, each once."""
    values = [value for _, value in runs(written)] if isinstance(written, list) else [written]
    return sorted({value for value in values if not isinstance(value, bool)})


def shown(written: Any) -> str:
    """The value as it reads in a message."""
    return "a list" if isinstance(written, list) else str(written).lower()


@needs(KEY)
def values_differ(values: Values, written: Any) -> Iterator[Fault]:
    if not isinstance(written, list):
        return
    rests = [
        n for n, item in enumerate(written) if isinstance(item, dict) and item["blocks"] == REST
    ]
    found = runs(written)
    if len(rests) > 1:
        yield fault(KEY, "is a second one; write a number of blocks", rests[1], "blocks")
    elif all(repr(value) == repr(found[0][1]) for _, value in found):
        yield fault(
            KEY, f"must not be a list of one value; for all blocks write {shown(found[0][1])}"
        )


@needs(KEY, "model.kind", "model.layers", "verify.model")
def each_block_has_a_value(
    values: Values, written: Any, kind: str, layers: int, small: Any
) -> Iterator[Fault]:
    if not isinstance(written, list) or kind != "decoder":
        return
    found = runs(written)
    given, has_rest = (
        sum(int(blocks) for blocks, _ in found if blocks != REST),
        any(b == REST for b, _ in found),
    )
    verified = layers if small is None else small.get("layers", layers)
    if (has_rest and given >= layers) or (not has_rest and given != layers):
        limit = (
            f"must be less than model.layers {layers}"
            if has_rest
            else f"must be model.layers {layers}"
        )
        yield fault(
            KEY,
            f"{limit} in its blocks together, found {given}; `blocks: rest` stands for what is"
            " left",
        )
    elif verified != layers and not has_rest:
        message = f"has a value for {layers} blocks, and verify.model.layers is {verified}"
        yield fault(KEY, f"{message}; write `blocks: rest` for one of them")
    elif verified != layers and given >= verified:
        message = (
            f"must be more than the {given} blocks of parallel.reshard_after_forward, found"
            f" {verified}"
        )
        yield fault("verify.model", message, "layers")
