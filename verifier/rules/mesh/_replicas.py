"""Replicas of a parameter that should be equal."""

from __future__ import annotations

import math

from ...trace import Run, Sketch, difference

NO_REPLICAS = "no parameter is both sharded and replicated"


def replicas_at_start(run: Run) -> dict[str, list[Sketch]]:
    """`replicas_of` the weights at the first forward."""
    return replicas_of(run, {name: [e.sketch for e in entries] for name, entries in run.parameters.items()})


def replicas_of(run: Run, sketches: dict[str, list[Sketch]]) -> dict[str, list[Sketch]]:
    """{parameter: sketch of each of its replicas} for those that one mesh shards or keeps in several copies.

    `sketches` are in the order of `run.parameters[name]`.
    """
    out: dict[str, list[Sketch]] = {}
    for name, values in sketches.items():
        copies: dict[int, Sketch] = {}
        entries = run.parameters[name]
        for entry, value in zip(entries, values, strict=True):
            if not entry.sharded or entry.ranks != entries[0].ranks:
                continue
            so_far = copies.get(entry.copy, [0.0] * len(value))
            copies[entry.copy] = [a + b for a, b in zip(so_far, value, strict=True)]
        if len(copies) > 1:
            out[name] = list(copies.values())
    return out


def replicas_apart(replicas: dict[str, list[Sketch]]) -> list[str]:
    """The parameters of which two replicas are not the same."""
    return sorted(
        name
        for name, (first, *others) in replicas.items()
        if any(not difference(first, other) <= 1e-9 * (1.0 + math.sqrt(first[0])) for other in others)
    )
