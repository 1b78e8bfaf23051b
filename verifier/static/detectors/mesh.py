"""Which mesh is given to whom."""

from __future__ import annotations

from collections.abc import Iterator

from ...finding import Hit
from ..events import Trace, covers
from ..looks import made_by, text
from ..values import holders
from .registry import detector

_MODEL = ("tp", "tensor_parallel", "pp", "pipeline_parallel", "ep", "expert_parallel", "cp", "context_parallel")


@detector("mesh-argument-wrong")
def mesh_argument_wrong(trace: Trace) -> Iterator[Hit]:
    seen: set[int] = set()
    for event, _ in trace.shards:
        mesh = event.arg(1, "mesh")
        made = made_by(mesh, "dist.init_device_mesh") if mesh is not None else None
        names = made.arg(2, "mesh_dim_names") if made is not None else None
        if made is None or names is None or names.kind not in ("tuple", "list") or id(made) in seen:
            continue
        words = [part.const for part in names.parts if isinstance(part.const, str)]
        if len(words) == 2 and "shard" in words[0] and "repl" in words[1]:
            said = text(names.node or made.node)
            told = (
                f"fully_shard takes the first dimension as replicas and the second as shards; {said} says the reverse"
            )
        elif len(words) == 2 and words[1] in _MODEL:
            told = f"fully_shard is given the whole mesh: it shards over {words[1]!r} too"
        else:
            continue
        seen.add(id(made))
        yield trace.hit("mesh-argument-wrong", told, made if "reverse" in told else event)


@detector("mesh-argument-wrong")
def parallel_after_shard(trace: Trace) -> Iterator[Hit]:
    for event in trace.ops("tp.parallelize_module"):
        model = event.arg(0, "module")
        shard = (
            next((trace.sharded_by(h, event) for h in holders(model) if trace.sharded_by(h, event)), None)
            if model
            else None
        )
        if shard is not None and covers(shard, event):
            told = f"parallelize_module after fully_shard (line {shard.line}): tensor parallelism comes first"
            yield trace.hit("mesh-argument-wrong", told, event)
