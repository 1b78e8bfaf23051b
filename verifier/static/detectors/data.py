"""Which rank sees which samples."""

from __future__ import annotations

from collections.abc import Iterator

from ...finding import Hit
from ..events import ITERATE, Event, Trace
from ..looks import is_const, made_by, names_in, text, trains
from ..values import Value, choices, reach
from .registry import detector

SAMPLER = "data.DistributedSampler"
_MAPS = ("data.TensorDataset", "data.Subset", "data.random_split", "data.ConcatDataset")


def _loaded_in_training(trace: Trace, loader: Event) -> bool:
    """Whether a loader is iterated over around a backward."""
    for event in trace.ops(ITERATE):
        inside = any(part is loader.result for part in reach(event.args[0]))
        if inside and any(event.node in b.loops for b in trace.methods("backward")):
            return True
    return False


@detector("same-data-on-every-rank")
def same_data_on_every_rank(trace: Trace) -> Iterator[Hit]:
    if not trace.certain or not trains(trace) or not trace.roots or trace.rank_uses:
        return
    if names_in(trace, "split_dataset_by_node", "node_rank", "dp_rank", "data_parallel_rank", "get_worker_info"):
        return
    for event in trace.ops("data.DataLoader"):
        dataset = event.arg(0, "dataset")
        samples = [event.kwargs.get("sampler"), event.kwargs.get("batch_sampler"), event.kwargs.get("collate_fn")]
        if (
            dataset is None
            or event.open
            or len(event.args) > 3
            or any(s is not None and not is_const(s, None) for s in samples)
        ):
            continue
        seeded = _same_order(trace, event)
        if _is_map(trace, dataset) and seeded and _loaded_in_training(trace, event) and not trace.escapes(event.result):
            told = f"{text(event.node)} has no sampler, and nothing in the script gives a rank data of its own"
            yield trace.hit("same-data-on-every-rank", told, event)


def _same_order(trace: Trace, event: Event) -> bool:
    """Whether all ranks take the samples in one order."""
    shuffle = event.arg(2, "shuffle")
    if shuffle is None or is_const(shuffle, False):
        return True
    generator = event.kwargs.get("generator")
    if generator is not None:
        return any(part.name == "torch.Generator" for part in reach(generator))
    return any(e.args and not e.args[0].rank for e in trace.ops("torch.manual_seed") if e.index < event.index)


def _is_map(trace: Trace, dataset: Value) -> bool:
    for one in choices(dataset):
        own = one.kind == "object" and one.cls is not None and "Iterable" not in "".join(trace.external_bases(one.cls))
        if not own and not (one.kind == "made" and one.name in _MAPS):
            return False
    return True


@detector("set-epoch-missing")
def set_epoch_missing(trace: Trace) -> Iterator[Hit]:
    if not trace.certain or names_in(trace, "set_epoch"):
        return
    for event in trace.ops(SAMPLER):
        shuffle = event.arg(3, "shuffle")
        if event.open or (shuffle is not None and not is_const(shuffle, True)):
            continue
        for turn in trace.ops(ITERATE):
            inside = any(part is event.result for part in reach(turn.args[0]))
            if inside and turn.loops and turn.node not in turn.loops and not trace.escapes(event.result):
                told = f"{text(event.node)} is iterated over once an epoch and never told the epoch: each has the same order"
                yield trace.hit("set-epoch-missing", told, event)
                break


_OTHER = ("tp", "cp", "sp", "tensor", "context", "tensor_parallel", "context_parallel", "sequence_parallel")


@detector("sampler-rank-ignores-mesh")
def sampler_rank_ignores_mesh(trace: Trace) -> Iterator[Hit]:
    meshes = [m for m in trace.ops("dist.init_device_mesh") if _splits_model(m)]
    if not meshes or not trace.ops("tp.parallelize_module", "tensor.experimental.context_parallel"):
        return
    for event in trace.ops(SAMPLER):
        rank = event.arg(2, "rank")
        by_world = (
            rank is None or is_const(rank, None) or (made_by(rank, "dist.get_rank") is not None and rank.rank == 2)
        )
        if by_world and not event.open:
            told = f"{text(event.node)} splits the data over all ranks, and the mesh has a dimension whose ranks need the same samples"
            yield trace.hit("sampler-rank-ignores-mesh", told, event)


def _splits_model(event: Event) -> bool:
    """Whether a mesh has a dimension for parts of one sample or layer."""
    names, shape = event.arg(2, "mesh_dim_names"), event.arg(1, "mesh_shape")
    if names is None or names.kind not in ("tuple", "list"):
        return False
    sizes = shape.parts if shape is not None and len(shape.parts) == len(names.parts) else [None] * len(names.parts)
    return any(
        n.const in _OTHER and not (s is not None and s.const == 1) for n, s in zip(names.parts, sizes, strict=True)
    )
