import re
from collections.abc import Iterator

from ...analysis.presence import unsharded
from ...analysis.root_cause import root_cause
from ...analysis.wording import some
from ...evidence import Evidence
from ...finding import Finding, Hit
from ...source.events import STORE, Event, Flow
from ...source.looks import has_parameters, text
from ...source.registry import detector
from ...source.values import choices
from ...trace.events import Late
from ..base import Rule
from ._late import gradients_differ, late_parameters


class ParamsAddedAfterShard(Rule):
    """Every parameter is registered before the root is sharded.

    Why: `fully_shard` takes the parameters that are there. Adapters, a resized embedding or a new head that come later
    are plain tensors: never gathered, never reduced; every rank trains its own copy without an error.
    Wrong:
        shard(model)
        model.adapter = nn.Linear(8, 8)  # FSDP does not know it
    Right:
        model.adapter = nn.Linear(8, 8)
        shard(model)
    Fix: Register every parameter first and call `fully_shard` last.
    Source: hao-ai-lab/FastVideo PR#1666; huggingface/peft PR#3578.
    """

    wants = "models"

    def applies(self, evidence: Evidence) -> str:
        return unsharded(evidence.trained)

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        late = late_parameters(run)
        if not late:
            if run.steps() == 0:
                return self.unknown("no optimizer step was seen")
            return self.passed("no parameter was registered after its root was sharded")
        if run.world_size == 1:
            return self.unknown("one rank reduces nothing")
        line = evidence.line_of(run, Late)
        apart = [name for name in late if gradients_differ(run, name)]
        if apart:
            return self.failed(
                f"registered after fully_shard took the model: {some(apart)}: plain tensors, whose gradients "
                "are not reduced and differ between ranks",
                line,
            )
        stopped = "" if run.completed else root_cause(run).error
        if re.search(r"mixed torch.Tensor and DTensor|The size of tensor a|shapes cannot be multiplied", stopped):
            return self.failed(
                f"registered after fully_shard took the model: {some(late)}, and the run stopped: {stopped[:160]}",
                line,
            )
        if run.steps() == 0:
            return self.unknown(f"{some(late)} are plain tensors, and no optimizer step was seen")
        return self.passed(f"{some(late)} came after sharding, with the same gradient on every rank")


_ADDS = ("resize_token_embeddings", "add_module", "register_module", "register_parameter", "add_adapter")


@detector("params-added-after-shard")
def params_added_after_shard(flow: Flow) -> Iterator[Hit]:
    late = {id(m): e for e, m in flow.shards}
    for event in flow.events:
        if event.op == STORE and event.on is not None and ".__init__" not in event.function:
            added = [v for v in choices(event.args[0]) if has_parameters(flow, v) and id(v) not in late]
            if added and flow.sharded_by(event.on, event) is not None and not _is_sharded_later(flow, event):
                yield flow.hit(
                    "params-added-after-shard", f"{text(event.node)} is set after its module was sharded", event
                )
        elif event.method in _ADDS and event.op == "" and event.on is not None:
            if flow.sharded_by(event.on, event) is not None:
                told = f"{event.method} adds parameters to a module that is sharded already"
                yield flow.hit("params-added-after-shard", told, event)
        elif event.op.endswith("get_peft_model") and event.args and flow.sharded_by(event.args[0], event) is not None:
            yield flow.hit(
                "params-added-after-shard", "get_peft_model adds parameters to a model that is sharded already", event
            )


def _is_sharded_later(flow: Flow, event: Event) -> bool:
    return any(e.index > event.index and m is event.on for e, m in flow.shards)
