from collections import Counter

from ...source.flow_queries import SAMPLER, is_const, made_by, text
from ...trace.events import ShardedInput, Wrap
from ..base import Event, Evidence, Finding, Flow, Hits, Rule, Run, count


class SamplerRankIgnoresMesh(Rule):
    """The ranks of one tensor-parallel or context-parallel group train on the same samples.

    Why: with tensor parallelism the ranks of a group hold parts of one model and need the same
    batch. A sampler that uses the global rank gives each rank its own: partial activations of
    different samples are summed, and nothing is raised. With context parallelism each rank attends
    to keys and values of the other ranks' samples.
    Wrong:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        tokens = dataset[rank::ranks]  # a different slice on every rank of a tp group
    Right:
        mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
        tokens = dataset[mesh["dp"].get_local_rank() :: mesh["dp"].size()]
    Fix: Give the sampler `mesh["dp"].get_local_rank()` and `mesh["dp"].size()`, not the global rank
    and world size.
    Source: huggingface/accelerate#3092; measured on (dp, tp) = (2, 2).
    """

    reads = frozenset({"single"})

    def applies(self, evidence: Evidence) -> str:
        none = (
            "no parameter is sharded over a tensor-parallel dim in addition to the mesh of"
            " fully_shard"
        )
        if evidence.trained.context_groups:
            none += "; context-parallel ranks are given parts of samples"
        return "" if _tensor_parallel_groups(evidence.trained) or _given_whole(evidence) else none

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        split, whole = _tensor_parallel_groups(run), _given_whole(evidence)
        groups = split or whole
        # Inputs that are DTensors have other local rows on each rank: samples cannot be compared
        # (sequence-parallel inputs).
        if run.all(ShardedInput):
            return self.unknown(
                "the inputs of the model are DTensors, whose samples cannot be compared"
            )
        for step in range(1, run.steps() + 1):
            rows = run.rows(step)
            for group in groups:
                other = next((rank for rank in group[1:] if rows[rank] != rows[group[0]]), None)
                if other is not None:
                    shared = (rows[other] & rows[group[0]]).total()
                    parts = (
                        "hold parts of the same layers"
                        if split
                        else "compute parts of the same sequences"
                    )
                    what = f"ranks {group[0]} and {other} {parts}, but get different samples"
                    same = f"{shared} of {rows[group[0]].total()} are the same"
                    return self.failed(f"{what} at step {step} ({same})", run.data_line())
        if not any(rows.total() for rows in run.rows(1)):
            return self.unknown("the model got no tensor whose rows can be compared")
        kind = "tensor-parallel group" if split else "context-parallel group"
        return self.passed(f"the same samples on the ranks of each of {count(len(groups), kind)}")

    def detect(self, flow: Flow) -> Hits:
        meshes = [m for m in flow.ops("dist.init_device_mesh") if _splits_model(m)]
        if not meshes or not flow.ops(
            "tp.parallelize_module", "tensor.experimental.context_parallel"
        ):
            return
        for event in flow.ops(SAMPLER):
            rank = event.arg(2, "rank")
            given = rank is not None and not is_const(rank, None)
            by_world = not given or (
                made_by(rank, "dist.get_rank") is not None and rank is not None and rank.rank == 2
            )
            if by_world and not event.open:
                what = (
                    "splits the data over all ranks, but the mesh has a dimension whose ranks need"
                    " the same samples"
                )
                yield f"{text(event.node)} {what}", event


def _tensor_parallel_groups(run: Run) -> list[list[int]]:
    """Ranks at the same position of parallel data meshes, if parameters are sharded over more than
    those.
    """
    meshes: dict[int, list[int]] = {}
    for trace in run.traces:
        given = [r.mesh.ranks for r in trace.of(Wrap) if r.mesh is not None]
        if not given:
            return []
        meshes[trace.rank] = max(given, key=len)
    if (
        # A rank outside the mesh it was given shows that the groups are not known.
        any(rank not in ranks for rank, ranks in meshes.items())
        or len(run.data_ranks) == run.world_size
    ):
        return []
    entries = [
        entry for copies in run.parameters.values() for entry in copies if entry.rank in meshes
    ]
    sharded = (e for e in entries if sum("S" in placement for placement in e.placements) > 1)
    if not any(set(meshes[e.rank]) < set(e.ranks) for e in sharded):
        return []
    places: dict[int, list[int]] = {}
    for rank, ranks in meshes.items():
        places.setdefault(ranks.index(rank), []).append(rank)
    return [group for group in places.values() if len(group) > 1]


def _given_whole(evidence: Evidence) -> list[list[int]]:
    """The context-parallel groups whose ranks are given whole samples, not parts that the script
    has cut.
    """
    run, single = evidence.trained, evidence.single
    if not run.context_groups or single is None or not single.steps() or not run.steps():
        return run.sequence_groups
    known = single.global_batch(1)
    # Context-parallel ranks that the script gives parts of a sequence have other rows rightly; only
    # groups that are given whole samples of one process must share them (context parallelism).
    return [group for group in run.context_groups if all(rows <= known for rows in _of(run, group))]


def _of(run: Run, group: list[int]) -> list[Counter[int]]:
    """The samples of the ranks of a group in the first step."""
    rows = run.rows(1)
    return [rows[rank] for rank in group if rank < len(rows)]


_OTHER = (
    "tp",
    "cp",
    "sp",
    "tensor",
    "context",
    "tensor_parallel",
    "context_parallel",
    "sequence_parallel",
)


def _splits_model(event: Event) -> bool:
    """Whether a mesh has a dimension for parts of one sample or layer."""
    names, shape = event.arg(2, "mesh_dim_names"), event.arg(1, "mesh_shape")
    if names is None or names.kind not in ("tuple", "list"):
        return False
    known = shape is not None and len(shape.parts) == len(names.parts)
    sizes = (
        [size.const for size in shape.parts]
        if shape is not None and known
        else [None] * len(names.parts)
    )
    return any(
        name.const in _OTHER and size != 1 for name, size in zip(names.parts, sizes, strict=True)
    )
