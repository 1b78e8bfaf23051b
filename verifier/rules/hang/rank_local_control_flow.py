import ast

from ...source.flow_queries import said
from ...source.values import Value, reach
from ..base import Event, Flow, Hits
from ._named import HangRule

# Questions to a rank's own value by which a step is skipped: not finite, or below a bound (faults
# rank_local_control_flow*.yaml).
_ASKS = ("isnan", "isfinite", "isinf", "Lt", "LtE", "Gt", "GtE")


class RankLocalControlFlow(HangRule):
    """All ranks take the decision to skip, repeat or stop together.

    Why: a NaN, an empty batch, an out-of-memory error or a low loss happens on one rank. If that
    rank alone skips its backward or leaves the loop, the others wait for it in theirs.
    Wrong:
        loss = loss_of(model, batch)
        if torch.isfinite(loss):
            loss.backward()
    Right:
        loss = loss_of(model, batch)
        good = torch.isfinite(loss).float()
        dist.all_reduce(good, op=dist.ReduceOp.MIN)
        if good:
            loss.backward()
    Fix: All-reduce the decision (MIN of "good", or MAX of "stop") before the branch, and branch on
    the result.
    Source: InternLM/xtuner PR#1852; mosaicml/composer PR#3843; the docstring of `fully_shard` on
    exceptions.
    """

    # of a step that only some ranks make, each clips its own
    # Of a step that only some ranks make, each clips its own: the uneven clip is a consequence
    # (exam round 10).
    explains = (*HangRule.explains, "manual-local-norm-clip")

    def detect(self, flow: Flow) -> Hits:
        """A step left out, or the end, on ranks whose own loss is not finite, or small enough."""
        for leave in flow.ops("(continue)", "(break)"):
            for guard in leave.guards:
                test = guard.test
                if not test.local:
                    continue
                asks = any(part.name.rpartition(".")[2] in _ASKS for part in reach(test))
                # A value that was reduced over ranks is the same everywhere: all skip together
                # (zoo/norm_guard.py).
                synced = any(part.synced for part in reach(test))
                if not asks or synced:
                    continue
                inside = any(guard.node in ast.walk(loop) for loop in leave.loops[-1:])
                if inside and _from_forward(flow, test) and _skips(flow, leave):
                    yield (
                        (
                            f"a rank whose own value meets {said(guard)} skips a step that the"
                            " others wait in"
                        ),
                        leave,
                    )
                    break


def _from_forward(flow: Flow, test: Value) -> bool:
    """Whether a sharded model's output went into a condition."""
    for part in reach(test):
        event = part.event if part.kind == "derived" and part.name == "forward" else None
        if (
            event is not None
            and event.on is not None
            and flow.sharded_by(event.on, event) is not None
        ):
            return True
    return False


def _skips(flow: Flow, leave: Event) -> bool:
    """Whether a backward comes later in the same loop, or in the iterations that are left out."""
    inside = [e for e in flow.methods("backward") if leave.loops[-1] in e.loops]
    return any(e.index > leave.index for e in inside) or (bool(inside) and leave.op == "(break)")
