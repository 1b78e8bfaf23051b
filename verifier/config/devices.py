"""GPUs and what they hold, compute and send at most: the table in devices.yaml, or a file of the
user's own.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import UserError
from .reading import files
from .reading.problems import NotValid
from .reading.schema import Form, filled
from .reading.words import similar

TABLE = "devices.yaml"
FORM = Form(__name__, "device.schema.json", "the device")
NOUN = "a device"
GIB = 1 << 30
OWN = (".yaml", ".yml")  # how the name of a user's file ends


@dataclass(frozen=True)
class Device:
    """One GPU in its node, in bytes, FLOP and seconds. Nothing is faster than these rates."""

    name: str
    title: str
    memory: int  # bytes that torch can allocate
    flops: Mapping[
        str, float
    ]  # FLOP/s of dense matrix products: bfloat16, float16, tfloat32, float32
    memory_bandwidth: float
    link: float  # bytes/s that a GPU sends inside a node, in one direction
    link_kind: str
    per_node: int  # GPUs
    network: float  # bytes/s that a GPU sends to other nodes, in one direction
    names: tuple[str, ...]
    sources: Mapping[str, str]
    # FLOP/s of the best products that were measured
    attainable: Mapping[str, float] = field(default_factory=dict)

    def with_node(self, per_node: int | None = None, network: float | None = None) -> Device:
        """The same GPU in another cluster: GPUs of a node, Gbit/s of network for each of them."""
        sent = self.network if network is None else network * 1e9 / 8
        sources = self.sources if network is None else {**self.sources, "network": "given"}
        return replace(self, per_node=per_node or self.per_node, network=sent, sources=sources)


def device(name: str) -> Device:
    """The device of this name in the table, or of this file. Raises UserError."""
    if name.lower().endswith(OWN):
        return _own(Path(name))
    found = named(name)
    if found is None:
        match = similar(name.lower(), list(table()))
        meant = f"; did you mean {match!r}?" if match else "."
        known = ", ".join(table())
        raise UserError(
            f"no GPU {name!r} is known{meant} Known are {known}, or give a file of your own,"
            " NAME.yaml"
        )
    return found


def named(name: str) -> Device | None:
    """The device that the table has under this name, in any spelling of capitals."""
    plain = name.lower()
    return next(
        (
            found
            for key, found in table().items()
            if plain in (key, *(n.lower() for n in found.names))
        ),
        None,
    )


@cache
def table() -> dict[str, Device]:
    """The devices that are known, by name. Do not change what it returns."""
    found = files.parsed(pkgutil.get_data(__name__, TABLE) or b"", Path(TABLE), NOUN)
    if found.problems:
        raise NotValid(found.problems)
    return {name: _device(name, values) for name, values in found.data.items()}


def _own(path: Path) -> Device:
    found = files.parsed(files.read_bytes(path, NOUN), path, NOUN)
    if () not in found.bad:
        files.validate(found, FORM)
    if found.problems:
        raise NotValid(found.problems)
    return _device(path.stem, found.data)


def _device(name: str, written: dict[str, Any]) -> Device:
    values = filled(written, FORM.root)
    flops = values["flops"]
    rates = {"float16": flops["bfloat16"], "tfloat32": flops["float32"], **flops}
    link = values["link"]
    return Device(
        name=name,
        title=values["title"],
        memory=int(values["memory"] * GIB),
        flops={dtype: rate * 1e12 for dtype, rate in rates.items()},
        memory_bandwidth=values["memory_bandwidth"] * 1e9,
        link=link["bandwidth"] * 1e9,
        link_kind=link["kind"],
        per_node=link["gpus"],
        network=values["network"] * 1e9 / 8,
        names=tuple(values["names"]),
        sources=values["sources"],
        attainable={dtype: rate * 1e12 for dtype, rate in values["attainable"].items()},
    )
