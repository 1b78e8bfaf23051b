"""What expert parallelism divides, and what it is not combined with: only what was run is
allowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...verifier.config.reading.validation import Fault
from .crosschecks import Values, counts_ranks, fault, needs
from .crosschecks_parallel import verification_mesh


@needs("parallel.ep", "model.kind", "model.experts")
def expert_parallelism_divides_experts(
    values: Values, ep: int, kind: str, experts: Any
) -> Iterator[Fault]:
    if ep > 1 and (kind != "decoder" or experts is None):
        yield fault("parallel.ep", f"must be 1 without model.experts, found {ep}")
    elif ep > 1 and experts["number"] % ep:
        yield fault(
            "parallel.ep", f"must divide model.experts.number {experts['number']}, found {ep}"
        )


@needs("parallel.ep", "parallel.dp_shard", "parallel.tp", "parallel.cp")
def expert_parallelism_divides_shards(
    values: Values, ep: int, shard: Any, tp: int, cp: int
) -> Iterator[Fault]:
    if ep > 1 and shard != "auto" and shard * tp * cp % ep:
        inner = f" x tp {tp}" if tp > 1 else f" x cp {cp}" if cp > 1 else ""
        yield fault("parallel.ep", f"must divide parallel.dp_shard {shard}{inner}, found {ep}")


@needs("parallel.ep", "parallel.dp_shard", "model.experts", "verify.nproc", "verify.reshard_to")
@counts_ranks
def expert_parallelism_is_verified(
    values: Values, ep: int, shard: Any, experts: Any, _nproc: Any, worlds: list[int]
) -> Iterator[Fault]:
    """On fewer ranks of a copy than `ep`, all of them share the experts."""
    if ep == 1 or experts is None or (mesh := verification_mesh(values)) is None:
        return
    if mesh.dp_shard * mesh.alike < 2:
        message = (
            f"is not verified on the mesh {mesh}, which shards over 1 rank; set verify.nproc"
            f" {2 * mesh.ranks}"
        )
        yield fault("parallel.ep", message)
        return
    elastic = shard == "auto" and values["parallel.dp_replicate"] != "auto"
    for world in (mesh.ranks, *(worlds if elastic else ())):
        shards = world // mesh.dp_replicate
        together = min(ep, shards)
        if (
            world > 1
            and world % mesh.dp_replicate == 0
            and (shards % together or experts["number"] % together)
        ):
            what = (
                f"the {shards} ranks that share a copy of the model on {world} ranks, and"
                " model.experts.number"
            )
            yield fault(
                "parallel.ep",
                f"must divide {what}, found {ep}; set verify.nproc and verify.reshard_to",
            )
            return


@needs("parallel.ep", "parallel.reshard_after_forward")
def expert_parallelism_reshards_whole(values: Values, ep: int, reshard: Any) -> Iterator[Fault]:
    if ep > 1 and not isinstance(reshard, bool):
        key = "parallel.reshard_after_forward"
        yield fault(key, f"must be true or false with parallel.ep {ep}, found {reshard}")


@needs("parallel.ep", "parallel.tp", "model.experts")
def experts_are_divided_beside_split_matrices(
    values: Values, ep: int, tp: int, experts: Any
) -> Iterator[Fault]:
    """Numbers are right without, but the verifier takes the largest mesh of `fully_shard` for the
    ranks with samples of their own: that of the experts then (feature_pairs: tp, experts).
    """
    if experts and 1 <= ep < tp:
        message = f"must be at least parallel.tp {tp} with model.experts, found {ep}"
        yield fault("parallel.ep", f"{message}: other meshes cannot be verified yet")
