"""Norms of gradients that only one rank's part goes into."""

from __future__ import annotations

from collections.abc import Iterator

from ...finding import Hit
from ..events import Event, Trace
from ..looks import shared, text
from ..values import Value, reach
from .registry import detector

_NORMS = ("norm", "sum", "square", "pow", "vector_norm", "abs", "max", "mean", "Pow")
_SCALES = ("mul_", "div_", "copy_")
_LOCAL = ("to_local", "_local_tensor")


def _gradient(trace: Trace, value: Value, event: Event) -> bool:
    """Whether a value is computed from the `.grad` of a parameter of a sharded model."""
    for part in reach(value):
        if part.kind == "attr" and part.name == "grad" and part.owner is not None:
            owner = part.owner
            holder = owner.owner if owner.kind == "item" and owner.name == "parameter" else None
            if holder is not None and trace.sharded_by(holder, event) is not None:
                return True
    return False


def _names(value: Value) -> set[str]:
    return {part.name.rpartition(".")[2] for part in reach(value)}


@detector("grad-norm-item-partial")
def grad_norm_item_partial(trace: Trace) -> Iterator[Hit]:
    """`.item()` or `float()` straight on a norm of one parameter's gradient."""
    reduced = [part for e in trace.matching(lambda n: n.startswith("dist.")) for a in e.given() for part in reach(a)]
    items: list[tuple[Event, Value]] = [(e, e.on) for e in trace.methods("item") if e.on is not None]
    items += [(e, e.args[0]) for e in trace.ops("builtins.float") if e.args]
    for event, value in items:
        if event.forked or not _plain_chain(value) or not _gradient(trace, value, event) or shared(value):
            continue
        if _names(value) & set(_LOCAL) or event.result in reduced or trace.partial:
            continue
        yield trace.hit(
            "grad-norm-item-partial", f"{text(event.node)} reads the part of the norm that this rank holds", event
        )


def _plain_chain(value: Value) -> bool:
    """Whether a value is a norm of `something.grad`, by methods alone."""
    current, normed = value, False
    for _ in range(6):
        if current.kind == "attr" and current.name == "grad":
            return normed
        if current.kind not in ("made", "derived") or current.name.rpartition(".")[2] not in (
            *_NORMS,
            "detach",
            "float",
        ):
            return False
        normed = normed or current.name.rpartition(".")[2] in ("norm", "sum", "vector_norm", "max", "mean")
        if not current.parts:
            return False
        current = current.parts[0]
    return False


@detector("manual-local-norm-clip")
def manual_local_norm_clip(trace: Trace) -> Iterator[Hit]:
    """Gradients scaled by a factor that comes from local shards and met no collective."""
    seen: set[int] = set()
    for event in trace.events:
        scales = event.method in _SCALES or (event.op == "(augmented)" and event.method in ("Mult", "Div"))
        if not scales or event.on is None or not event.args or not _gradient(trace, event.on, event):
            continue
        factor = event.args[0]
        for part in reach(factor):
            taken = part.name in _LOCAL and _gradient(trace, part, event)
            if taken and _names(factor) & {"norm", "vector_norm", "square", "pow", "Pow"} and not shared(factor):
                node = part.node if part.node is not None else event.node
                if id(node) not in seen:
                    seen.add(id(node))
                    told = f"{text(event.node)} scales by a norm of this rank's shards ({text(node)})"
                    yield trace.hit("manual-local-norm-clip", told, part.event or event)
                break
