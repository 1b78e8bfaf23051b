"""Replicas of a parameter that should be equal."""

import math

from ...trace import Run, Sketch, difference
from ...trace.sketches import add

NO_REPLICAS = "no parameter is both sharded and replicated"


def replicas_at_start(run: Run) -> dict[str, list[Sketch]]:
    """`replicas_of` the weights at the first forward."""
    return replicas_of(
        run, {name: [e.sketch for e in entries] for name, entries in run.parameters.items()}
    )


def replicas_of(run: Run, sketches: dict[str, list[Sketch]]) -> dict[str, list[Sketch]]:
    """{parameter: sketch of each of its replicas} for parameters that one mesh shards and keeps in
    several copies.

    `sketches` are in the order of `run.parameters[name]`.
    """
    out: dict[str, list[Sketch]] = {}
    for name, values in sketches.items():
        copies: dict[int, Sketch] = {}
        entries = run.parameters[name]
        for entry, value in zip(entries, values, strict=True):
            # Ranks of another mesh may have a parameter of the same name: only those of one mesh
            # hold copies of each other.
            if entry.sharded and entry.ranks == entries[0].ranks:
                copies[entry.copy] = add(copies.get(entry.copy), value)
        if len(copies) > 1:
            out[name] = list(copies.values())
    return out


def replicas_apart(replicas: dict[str, list[Sketch]]) -> list[str]:
    """The parameters with replicas that differ."""
    return sorted(
        name
        for name, (first, *others) in replicas.items()
        if any(
            # Replicas have the same bits; 1e-9 covers the order in which the sketches of shards are
            # summed. `not <=` so that NaN differs.
            not difference(first, other) <= 1e-9 * (1.0 + math.sqrt(first[0]))
            for other in others
        )
    )
