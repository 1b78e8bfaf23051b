"""The mesh that `fsdp2 verify` runs on: that of the spec, or one of the same shape on fewer ranks.

A mesh of production rarely fits on the machine where the project is written. The same shape on
fewer ranks runs the same code: every dimension above 1 stays above 1, as small as possible (2, or
the smallest prime factor, so that what divides into the parts of the one divides into those of the
other).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

RANKS = 2  # of a verification, where the mesh needs no more


class Mesh(NamedTuple):
    """Ranks in each dimension."""

    dp_replicate: int
    dp_shard: int
    tp: int = 1
    cp: int = 1

    @property
    def alike(self) -> int:
        """Ranks that read the same samples."""
        return self.tp * self.cp

    @property
    def ranks(self) -> int:
        return self.dp_replicate * self.dp_shard * self.alike

    def __str__(self) -> str:
        """`2 x 8`: the dimensions, tp and cp only if there is any."""
        return " x ".join(map(str, (*self[:2], *(size for size in self[2:] if size > 1))))


def shards(parallel: Mapping[str, Any], launch: Mapping[str, Any]) -> Any:
    """`parallel.dp_shard`: where the copies are as many as the ranks allow, `auto` means the
    devices of a node.
    """
    shard = parallel["dp_shard"]
    if parallel["dp_replicate"] != "auto" or shard != "auto" or not launch["engines"]:
        return shard
    return max(1, launch["devices_per_node"] // (parallel["tp"] * parallel["cp"]))


def production(parallel: Mapping[str, Any], launch: Mapping[str, Any]) -> Mesh | None:
    """The mesh of training; None if a dimension is `auto` and no launch section says on how many
    ranks it runs.
    """
    replicate, tp, cp = (parallel[key] for key in ("dp_replicate", "tp", "cp"))
    shard = shards(parallel, launch)
    ranks = launch["nodes"] * launch["devices_per_node"] if launch["engines"] else 0
    if replicate == "auto":
        replicate, rest = divmod(ranks, shard * tp * cp) if shard != "auto" else (0, 0)
        return Mesh(replicate, shard, tp, cp) if replicate and rest == 0 else None
    if shard == "auto":
        shard, rest = divmod(ranks, replicate * tp * cp)
        return Mesh(replicate, shard, tp, cp) if ranks and rest == 0 else None
    return Mesh(replicate, shard, tp, cp)


def verified(
    parallel: Mapping[str, Any], launch: Mapping[str, Any], nproc: int | str
) -> Mesh | None:
    """The mesh of the verification on `nproc` ranks (`auto`: as few as the shape allows); None if
    there is none.
    """
    shard = shards(parallel, launch)
    if parallel["dp_replicate"] == shard == "auto":
        return None
    parallel, full = {**parallel, "dp_shard": shard}, production(parallel, launch)
    least = _smallest(parallel, full)
    if nproc == "auto":
        return least
    replicate, shard, tp, cp = (parallel[key] for key in Mesh._fields)
    ranks = int(nproc)
    if replicate == "auto":
        copies, rest = divmod(ranks, shard * tp * cp)
        full = full or Mesh(2, shard, tp, cp)
        if rest == 0:
            return Mesh(copies, shard, tp, cp)
    if full is not None and ranks == full.ranks:
        return full
    if least is not None and ranks == least.ranks:
        return least
    if shard == "auto" and ranks % (replicate * tp * cp) == 0:
        return Mesh(replicate, ranks // (replicate * tp * cp), tp, cp)
    return next(_smaller(full, ranks), None) if full is not None and ranks < full.ranks else None


def _smallest(parallel: Mapping[str, Any], full: Mesh | None) -> Mesh | None:
    replicate, tp, cp = (
        2 if parallel[key] == "auto" else smallest_factor(parallel[key])
        for key in ("dp_replicate", "tp", "cp")
    )
    if parallel["dp_shard"] == "auto":
        sharded = replicate * tp * cp == 1 or (full is not None and full.dp_shard > 1)
        return Mesh(replicate, RANKS if sharded else 1, tp, cp)
    mesh = Mesh(replicate, smallest_factor(parallel["dp_shard"]), tp, cp)
    return mesh if mesh.ranks >= RANKS else None


def _smaller(full: Mesh, ranks: int) -> Iterator[Mesh]:
    """Those on so many ranks, the nearest to the whole one first: dp_shard takes what the others
    leave.
    """
    replicates = (full.dp_replicate, min(2, full.dp_replicate), smallest_factor(full.dp_replicate))
    splits = product(*((size, smallest_factor(size)) for size in (full.tp, full.cp)))
    for (tp, cp), replicate in product(splits, replicates):
        shard, rest = divmod(ranks, replicate * tp * cp)
        if rest == 0 and min(full.dp_shard, 2) <= shard <= full.dp_shard:
            yield Mesh(replicate, shard, tp, cp)


def smallest_factor(number: int) -> int:
    """The smallest prime factor; 1 of 1."""
    return next(
        (factor for factor in range(2, int(number**0.5) + 1) if number % factor == 0), number
    )
