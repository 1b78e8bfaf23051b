import ast
import re

from ...analysis.applicability import sharded_once, unsharded
from ...source.events import Flow, covers
from ...source.flow_queries import text
from ...source.values import holders
from ...trace.events import Place, Shard
from ..base import Hits, RaisedRule, RootCause, Run

# A guard that asks whether the module is sharded already (`has_fsdp`, `isinstance(m, FSDPModule)`)
# makes the order safe.
_ASKS = re.compile(r"(?i)(has|is|isinstance|get)[^ ]*(fsdp|shard|dtensor)")


class ParentBeforeChild(RaisedRule):
    """`fully_shard` is called bottom-up: on the blocks first, on the root last.

    Why: the call on the root groups every parameter that has no group yet. The later call on a
    block finds DTensors, treats them as tensor parallelism and fails on their mesh with an
    unrelated message.
    Wrong:
        fully_shard(model)
        for block in model.blocks:
            fully_shard(block)  # raises TypeError
    Right:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    Fix: Move the call on the root below the calls on its blocks.
    Source: the docstring of `fully_shard` ("should be called bottom-up").
    """

    pattern = (
        r"Invariant encountered: value was None when it should not be|Cannot concatenate"
        r" overlapping meshes"
    )

    def absent(self, train: Run) -> str:
        return unsharded(train) or sharded_once(train)

    def fits(self, run: Run, cause: RootCause) -> bool:
        lines = [f.line for f in cause.frames]
        meshes = set(
            re.findall(r"DeviceMesh\((\([^)]*\))", cause.error)
        )  # two of them: tensor parallelism
        # The same text with two meshes in it is tensor parallelism applied in the wrong order, not
        # this fault (zoo/tp_fsdp.py).
        return len(meshes) < 2 and any(
            r.at_line and r.at_line.line in lines for r in run.places(Shard)
        )

    def place(self, run: Run, cause: RootCause) -> Place | None:
        """The call before the one that failed: the parent's."""
        lines: list[Place] = [r.at_line for r in run.places(Shard) if r.at_line]
        failed = lines[-1]
        return next((line for line in reversed(lines) if line.line != failed.line), failed)

    def detect(self, flow: Flow) -> Hits:
        for event, module in flow.shards:
            if any(
                _ASKS.search(ast.unparse(guard.node.test))
                for guard in event.guards
                if isinstance(guard.node, ast.If)
            ):
                continue  # it asks whether the module is sharded already
            for holder in list(holders(module))[1:]:
                parent, made = flow.first_shard.get(id(holder)), module.event
                # A block that is made after the parent was sharded was no part of it: it is sharded
                # alone before it is added (linted right scripts of the exam (growing models)).
                if parent is None or (made is not None and made.index > parent.index):
                    continue  # what is made after the parent was sharded was no part of it
                if parent is not event and covers(parent, event):
                    yield (
                        (
                            f"{text(event.node)} is called after its parent was sharded in line"
                            f" {parent.line}"
                        ),
                        event,
                    )
                    break
