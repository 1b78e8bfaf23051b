from collections.abc import Iterator

from ...finding import Hit
from ...source.events import CALL, Event, Flow, exclusive
from ...source.looks import text
from ...source.looks_hang import said
from ...source.registry import detector
from ...source.values import Value, reach
from ._named import HangRule


class RankConditionalCollective(HangRule):
    """Every rank makes every collective call; what only one rank does with the result comes after.

    Why: `full_tensor`, state dicts, `dcp.save`, a forward of a sharded model and a barrier wait for all ranks. Under
    `if rank == 0:`, or after an early `return` of the others, one rank waits for ever, or meets the next collective of
    the others and takes wrong numbers or aborts.
    Wrong:
        if dist.get_rank() == 0:
            print(model.head.weight.full_tensor().norm())  # a collective
    Right:
        norm = model.head.weight.full_tensor().norm()
        if dist.get_rank() == 0:
            print(norm)
    Fix: Move the call above the condition on the rank, so that all ranks make it; keep only the use of its result
    (print, write) below.
    Source: huggingface/transformers PR#35234; pytorch#143536; pytorch#134095; axolotl#3476.
    """


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
def rank_conditional_collective(flow: Flow) -> Iterator[Hit]:
    seen: set[int] = set()
    for event in flow.events:
        guard = event.on_some_ranks
        what = _collective(flow, event) if guard is not None else ""
        if not what or guard is None or id(event.node) in seen or _met_elsewhere(flow, event):
            continue
        seen.add(id(event.node))
        line = getattr(guard.node, "lineno", event.line)
        yield flow.hit(
            "rank-conditional-collective", f"{what} happens only on ranks that meet {said(guard)} (line {line})", event
        )


def _collective(flow: Flow, event: Event) -> str:
    """What a collective is called; empty for anything else."""
    if any(name in event.kwargs for name in _GROUPED) or event.open:
        return ""
    if event.op in COLLECTIVES:
        within = event.op in ("dist.all_reduce", "dist.broadcast", "dist.reduce") and len(event.args) > 2
        barrier = event.op == "dist.barrier" and event.args
        return "" if within or barrier else text(event.node)
    if event.op in CHECKPOINTS:
        return text(event.node)
    if event.op in STATES and event.args and flow.managed_by(event.args[0], event) is not None:
        return text(event.node)
    if event.op == CALL and event.on is not None and flow.sharded_by(event.on, event) is not None:
        return f"the forward {text(event.node)}, which gathers parameters,"
    if event.method == "full_tensor" and event.on is not None and _parameter_like(flow, event.on, event):
        return text(event.node)
    return ""


def _parameter_like(flow: Flow, value: Value, event: Event) -> bool:
    """Whether a value is a parameter, or an entry of the state dict, of a sharded model."""
    for part in reach(value):
        if part.kind == "item" and part.name == "parameter" and part.owner is not None:
            return flow.managed_by(part.owner, event) is not None
        if part.kind == "made" and part.name == "state_dict" and part.event.on is not None:
            return flow.managed_by(part.event.on, event) is not None
    return False


def _met_elsewhere(flow: Flow, event: Event) -> bool:
    """Whether the other ranks come to the same kind of collective in the opposite branch."""
    if event.op == CALL:
        return any(exclusive(event, other) for other in flow.forwards(event.on)) if event.on is not None else False
    same = flow.by_op.get(event.op, []) if event.op else flow.methods(event.method)
    return any(exclusive(event, other) for other in same)
