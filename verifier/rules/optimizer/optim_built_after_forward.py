from collections.abc import Iterator

from ...evidence import Evidence
from ...finding import Finding, Hit
from ...source.events import Event, Flow, covers
from ...source.looks import is_const, text
from ...source.registry import detector
from ...source.values import const
from ..base import Rule
from ._held import judge_held


class OptimBuiltAfterForward(Rule):
    """The optimizer is built before any forward, or after a reshard.

    Why: a forward leaves the root group unsharded (without gradients, or with `reshard_after_forward=False`, others
    too). `model.parameters()` then returns temporary plain tensors: the optimizer holds those, and embedding, norm
    and head never train while the blocks do.
    Wrong:
        shard(model)
        with torch.no_grad():
            model(batch)  # a shape check, a FLOP count, a first evaluation
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    Right:
        shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        with torch.no_grad():
            model(batch)
    Fix: Build the optimizer right after sharding, or call `model.reshard()` before you build it.
    Source: pytorch#149205; pytorch#144289.
    """

    def judge(self, evidence: Evidence) -> Finding:
        return judge_held(self, evidence, after_forward=True)


@detector("optim-built-after-forward")
def optim_built_after_forward(flow: Flow) -> Iterator[Hit]:
    for event, models in flow.optimizers:
        for model in models:
            shard = flow.sharded_by(model, event)
            if (
                shard is None
                or shard.open
                or not is_const(shard.kwargs.get("reshard_after_forward", const(None)), None)
            ):
                continue
            ran = [f for f in flow.forwards(model) if covers(shard, f) and covers(f, event)]
            if not ran or not _params_taken_late(flow, event, ran[-1]):
                continue
            between = flow.events[ran[0].index : event.index]
            if not any(e.method in ("backward", "reshard", "state_dict") or e.op.startswith("dsd.") for e in between):
                ran_at = f"{text(ran[0].node)} in line {ran[0].line}"
                told = f"{ran_at} left the root unsharded; the optimizer built here is given its temporary tensors"
                yield flow.hit("optim-built-after-forward", told, event)
                break


def _params_taken_late(flow: Flow, event: Event, forward: Event) -> bool:
    """Whether no `parameters()` was taken before the forward."""
    taken = flow.methods("parameters", "named_parameters")
    return not any(e.index < forward.index for e in taken)
