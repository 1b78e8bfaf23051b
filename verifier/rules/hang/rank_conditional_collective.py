import re

from ...analysis.syntax import walk
from ...source.events import CALL, Event, Flow, Guard, exclusive
from ...source.flow_queries import GETTERS, SETTERS, said, text
from ...source.values import Value, reach
from ...trace.events import Place
from ..base import Hits, count
from ._named import HangRule

_COLLECTIVE = re.compile(
    r"dist\.(all_reduce|all_gather|all_gather_object|all_gather_into_tensor|all_to_all|all_to_all_single|broadcast|"
    r"broadcast_object_list|reduce|reduce_scatter|reduce_scatter_tensor|gather|gather_object|scatter|barrier|"
    r"monitored_barrier|new_group|init_device_mesh|init_process_group)|dcp\.(save|load|async_save)"
)
# Arguments that make a collective one of some ranks: under a rank condition that is right
# (zoo/checkpoint_hsdp.py; pairs.yaml rank-conditional-collective).
_GROUPED = ("group", "process_group", "no_dist")


class RankConditionalCollective(HangRule):
    """Every rank calls every collective; only the use of its result depends on the rank.

    Why: `full_tensor`, state dicts, `dcp.save`, a forward of a sharded model and a barrier wait for
    all ranks. Under `if rank == 0:`, or after an early `return` of the others, one rank waits for
    ever, or it is matched with the next collective of the others and gets wrong numbers or aborts.
    Wrong:
        if dist.get_rank() == 0:
            print(model.head.weight.full_tensor().norm())  # a collective
    Right:
        norm = model.head.weight.full_tensor().norm()
        if dist.get_rank() == 0:
            print(norm)
    Fix: Call it on all ranks, above the condition on the rank; keep only the use of its result
    (print, write) below.
    Source: huggingface/transformers PR#35234; pytorch#143536; pytorch#134095; axolotl#3476.
    """

    def detect(self, flow: Flow) -> Hits:
        under: dict[int, tuple[Guard, list[tuple[str, Event]]]] = {}
        for event in flow.events:
            guard = event.on_some_ranks
            what = _collective(flow, event) if guard is not None else ""
            # If the other branch calls the same collective, all ranks meet (pairs.yaml
            # rank-conditional-collective).
            if what and guard is not None and not _in_opposite_branch(flow, event):
                under.setdefault(id(guard.node), (guard, []))[1].append((what, event))
        for guard, calls in under.values():
            yield _under(guard, calls)


def _under(guard: Guard, calls: list[tuple[str, Event]]) -> tuple[str, Event | Place]:
    """One hit for all collectives under a condition, at the condition: that is the line to edit."""
    first, event = calls[0]
    others = {call.line for _, call in calls} - {event.line}
    more = f" (line {event.line}, and {count(len(others), 'other line')})" if others else ""
    at = getattr(guard.node, "lineno", event.line)
    message = f"{first}{more} is called only on ranks that meet {said(guard)} (line {at})"
    if not any(node is guard.node for node in walk(event.module.tree)):
        return message, event  # the condition stands in another file
    code = event.module.code(at)
    path = str(event.module.path)
    return message, Place(file=path, line=at, function=event.function, code=code)


def _collective(flow: Flow, event: Event) -> str:
    """What a collective is called; empty for anything else."""
    if any(name in event.kwargs for name in _GROUPED) or event.open:
        return ""
    found = False
    if _COLLECTIVE.fullmatch(event.op):
        within = (
            # The third positional argument of these is the group.
            event.op in ("dist.all_reduce", "dist.broadcast", "dist.reduce") and len(event.args) > 2
        )
        found = (
            not within
            and not (event.op == "dist.barrier" and event.args)
            and not _counts_its_ranks(event)
        )
    elif event.op in (*GETTERS, *SETTERS):
        found = bool(event.args) and flow.managed_by(event.args[0], event) is not None
    elif event.op == CALL and event.on is not None and flow.sharded_by(event.on, event) is not None:
        return f"the forward {text(event.node)}, which gathers parameters,"
    elif event.method == "full_tensor" and event.on is not None:
        found = _parameter_like(flow, event.on, event)
    return text(event.node) if found else ""


def _counts_its_ranks(event: Event) -> bool:
    """Whether a process group is made with a fixed number of ranks: some of the processes, which it
    may leave others out of.
    """
    size = event.kwargs.get("world_size") if event.op == "dist.init_process_group" else None
    # init_process_group with a fixed world_size makes a group of some of the processes: the
    # condition chooses them (linted right scripts of the exam).
    return size is not None and size.kind == "const"


def _parameter_like(flow: Flow, value: Value, event: Event) -> bool:
    """Whether a value is a parameter, or an entry of the state dict, of a sharded model."""
    for part in reach(value):
        if part.kind == "item" and part.name == "parameter" and part.owner is not None:
            return flow.managed_by(part.owner, event) is not None
        if part.kind == "made" and part.name == "state_dict" and part.event.on is not None:
            return flow.managed_by(part.event.on, event) is not None
    return False


def _in_opposite_branch(flow: Flow, event: Event) -> bool:
    """Whether the other ranks call the same kind of collective in the opposite branch."""
    if event.op == CALL:
        same = flow.forwards(event.on) if event.on is not None else []
    else:
        same = flow.by_op.get(event.op, []) if event.op else flow.methods(event.method)
    return any(exclusive(event, other) for other in same)
