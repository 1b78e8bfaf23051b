"""What only some ranks do, while the others wait for them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ...finding import Hit
from ..events import CALL, Event, Guard, Trace, exclusive
from ..looks import text
from ..values import Value, reach
from .registry import detector

COLLECTIVES = {
    f"dist.{n}" for n in ("all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "barrier")
}
COLLECTIVES |= {
    f"dist.{n}" for n in ("broadcast", "broadcast_object_list", "reduce", "reduce_scatter", "reduce_scatter_tensor")
}
COLLECTIVES |= {
    f"dist.{n}" for n in ("all_to_all", "all_to_all_single", "gather", "gather_object", "scatter", "monitored_barrier")
}
COLLECTIVES |= {"dist.new_group", "dist.init_device_mesh", "dist.init_process_group"}
CHECKPOINTS = {"dcp.save", "dcp.load", "dcp.async_save"}
STATES = {"dsd.get_model_state_dict", "dsd.get_state_dict", "dsd.set_model_state_dict", "dsd.set_state_dict"}
STATES |= {"dsd.get_optimizer_state_dict", "dsd.set_optimizer_state_dict"}
_GROUPED = ("group", "process_group", "no_dist")


@detector("rank-conditional-collective")
def rank_conditional_collective(trace: Trace) -> Iterator[Hit]:
    seen: set[int] = set()
    for event in trace.events:
        guard = event.on_some_ranks
        what = _collective(trace, event) if guard is not None else ""
        if not what or guard is None or id(event.node) in seen or _met_elsewhere(trace, event):
            continue
        seen.add(id(event.node))
        line = getattr(guard.node, "lineno", event.line)
        yield trace.hit(
            "rank-conditional-collective", f"{what} happens only on ranks that meet {_said(guard)} (line {line})", event
        )


def _collective(trace: Trace, event: Event) -> str:
    """What a collective is called; empty for anything else."""
    if any(name in event.kwargs for name in _GROUPED) or event.open:
        return ""
    if event.op in COLLECTIVES:
        within = event.op in ("dist.all_reduce", "dist.broadcast", "dist.reduce") and len(event.args) > 2
        barrier = event.op == "dist.barrier" and event.args
        return "" if within or barrier else text(event.node)
    if event.op in CHECKPOINTS:
        return text(event.node)
    if event.op in STATES and event.args and trace.managed_by(event.args[0], event) is not None:
        return text(event.node)
    if event.op == CALL and event.on is not None and trace.sharded_by(event.on, event) is not None:
        return f"the forward {text(event.node)}, which gathers parameters,"
    if event.method == "full_tensor" and event.on is not None and _parameter_like(trace, event.on, event):
        return text(event.node)
    return ""


def _parameter_like(trace: Trace, value: Value, event: Event) -> bool:
    """Whether a value is a parameter, or an entry of the state dict, of a sharded model."""
    for part in reach(value):
        if part.kind == "item" and part.name == "parameter" and part.owner is not None:
            return trace.managed_by(part.owner, event) is not None
        if part.kind == "made" and part.name == "state_dict" and part.event.on is not None:
            return trace.managed_by(part.event.on, event) is not None
    return False


def _met_elsewhere(trace: Trace, event: Event) -> bool:
    """Whether the other ranks come to the same kind of collective in the opposite branch."""
    if event.op == CALL:
        return any(exclusive(event, other) for other in trace.forwards(event.on)) if event.on is not None else False
    same = trace.by_op.get(event.op, []) if event.op else trace.methods(event.method)
    return any(exclusive(event, other) for other in same)


def _said(guard: Guard) -> str:
    test = text(getattr(guard.node, "test", guard.node), 40)
    return f"`{test}`" if guard.branch else f"`not ({test})`"


_FINITE = ("isnan", "isfinite", "isinf")


@detector("rank-local-control-flow")
def rank_local_control_flow(trace: Trace) -> Iterator[Hit]:
    """A step left out, or the end, on ranks whose own loss is not finite, or small enough."""
    for leave in trace.ops("(continue)", "(break)"):
        for guard in leave.guards:
            test = guard.test
            asks = any(part.name.rpartition(".")[2] in (*_FINITE, "Lt", "LtE", "Gt", "GtE") for part in reach(test))
            synced = any(part.synced for part in reach(test))
            inside = any(guard.node in ast.walk(loop) for loop in leave.loops[-1:])
            if asks and test.local and not synced and inside and _from_forward(trace, test) and _skips(trace, leave):
                told = f"a rank whose own value meets {_said(guard)} leaves out a step that the others wait in"
                yield trace.hit("rank-local-control-flow", told, leave)
                break


def _from_forward(trace: Trace, test: Value) -> bool:
    """Whether a sharded model's output went into a condition."""
    for part in reach(test):
        event = part.event if part.kind == "derived" and part.name == "forward" else None
        if event is not None and event.on is not None and trace.sharded_by(event.on, event) is not None:
            return True
    return False


def _skips(trace: Trace, leave: Event) -> bool:
    """Whether a backward stands behind, in the same loop, or in the turns that are left out."""
    inside = [e for e in trace.methods("backward") if leave.loops[-1] in e.loops]
    return any(e.index > leave.index for e in inside) or (bool(inside) and leave.op == "(break)")
