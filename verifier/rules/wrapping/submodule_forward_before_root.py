from ...analysis.applicability import sharded_once, unsharded
from ...source.events import CALL, Flow, covers
from ...source.flow_queries import is_known, text
from ...source.values import choices, root_of
from ...trace.events import Model, Place
from ..base import Hits, RaisedRule, RootCause, Run


class SubmoduleForwardBeforeRoot(RaisedRule):
    """The first forward after sharding goes through the root, not through a block.

    Why: FSDP determines the root module at the first forward. A block that runs alone first (a
    shape probe, a FLOP count, a warm-up) becomes the root, and the forward of the real root raises.
    Wrong:
        shard(model)
        model.blocks[0](torch.randn(2, 3, 8))  # a probe
        model(batch)  # raises RuntimeError
    Right:
        model.blocks[0](torch.randn(2, 3, 8))  # a probe, before sharding
        shard(model)
        model(batch)
    Fix: Move the call on the block above the sharding, or call the root first.
    Source: torch 2.13.0 `_fsdp_state.py`.
    """

    pattern = r"FSDP state has already been lazily initialized for (?P<module>\S+)"

    def absent(self, train: Run) -> str:
        return unsharded(train) or sharded_once(train)

    def place(self, run: Run, cause: RootCause) -> Place | None:
        return run.line_of(Model) or cause.location

    def detect(self, flow: Flow) -> Hits:
        for event in flow.by_op.get(CALL, []):
            module = event.on
            if module is None or event.function.rpartition(".")[2] == "forward" or flow.partial:
                continue
            for one in choices(module):
                root = root_of(one)
                shard = flow.sharded_by(one, event)
                if (
                    root is one
                    or shard is None
                    or flow.sharded_by(root, event) is None
                    or not is_known(flow, root)
                ):
                    continue
                forwards = flow.forwards(root)
                if forwards and event.index < forwards[0].index and covers(event, forwards[0]):
                    what = (
                        "runs a part of the sharded model before the first forward of the model"
                        f" (line {forwards[0].line})"
                    )
                    yield f"{text(event.node)} {what}", event
                    return
