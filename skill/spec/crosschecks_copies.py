"""`parallel.dp_replicate: auto`: as many copies as the ranks make, each of a known size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...verifier.config.reading.validation import Fault
from .crosschecks import Values, counts_ranks, fault, needs
from .crosschecks_parallel import MESH, verification_mesh
from .meshes import shards


@needs(*MESH)
@counts_ranks
def copies_have_a_size(values: Values, parallel: Any, nproc: Any, *_launch: Any) -> Iterator[Fault]:
    if parallel["dp_replicate"] != "auto" or verification_mesh(values) is not None:
        return
    size = shards(parallel, values["launch"])
    if size == "auto":
        message = "auto needs parallel.dp_shard, or the devices of a node in a launch section"
        yield fault("parallel.dp_replicate", message)
    else:
        message = f"must be a multiple of the {size} ranks of a copy, found {nproc}"
        yield fault("verify.nproc", f"{message}; leave it out for a smaller mesh of this shape")


@needs(*MESH, "verify.reshard_to")
@counts_ranks
def other_worlds_are_copies(values: Values, parallel: Any, *_others: Any) -> Iterator[Fault]:
    """A single rank always fits: there the mesh is left out."""
    mesh = verification_mesh(values)
    if parallel["dp_replicate"] != "auto" or mesh is None:
        return
    unit = mesh.dp_shard * mesh.alike
    for number, world in enumerate(values["verify.reshard_to"]):
        if world != 1 and world % unit:
            message = f"must be a multiple of the {unit} ranks of a copy of the verification"
            yield fault("verify.reshard_to", f"{message}, found {world}", number)
