import re

from ...analysis.root_cause import root_cause
from ...source.events import STORE, Flow
from ...source.flow_queries import has_parameters, text
from ...source.values import choices
from ...trace.events import Late
from ..base import Evidence, Finding, Hits, some
from ._base import (
    NO_STEP,
    ONE_RANK,
    ShardedModelRule,
    called_on_sharded,
    gradients_differ,
    late_parameters,
)


class ParamsAddedAfterShard(ShardedModelRule):
    """Every parameter is registered before the root is sharded.

    Why: `fully_shard` manages the parameters that exist when it is called. Adapters, a resized
    embedding or a new head that are added later stay plain tensors, neither gathered nor reduced:
    every rank trains its own copy without an error.
    Wrong:
        shard(model)
        model.adapter = nn.Linear(8, 8)  # not managed by FSDP
    Right:
        model.adapter = nn.Linear(8, 8)
        shard(model)
    Fix: Register every parameter first and call `fully_shard` last.
    Source: hao-ai-lab/FastVideo PR#1666; huggingface/peft PR#3578.
    """

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        late = late_parameters(run)
        if not late:
            return self.passed_with_steps(
                run, "no parameter was registered after its root was sharded"
            )
        if run.world_size == 1:
            return self.unknown(ONE_RANK)
        line = run.line_of(Late)
        if apart := [name for name in late if gradients_differ(run, name)]:
            what = "plain tensors, whose gradients are not reduced and differ between ranks"
            return self.failed(
                f"{some(apart)} were registered after fully_shard and are {what}", line
            )
        stopped = "" if run.completed else root_cause(run).error
        if re.search(
            # Texts of torch where a plain parameter meets sharded ones, or a resized layer meets
            # its old shard (faults params_added_after_shard*.yaml).
            r"mixed torch.Tensor and DTensor|The size of tensor a|shapes cannot be multiplied",
            stopped,
        ):
            what = f"the run stopped with {stopped[:160]}"
            return self.failed(f"{some(late)} were registered after fully_shard; {what}", line)
        if run.steps() == 0:
            return self.unknown(f"{some(late)} are plain tensors, and {NO_STEP}")
        return self.passed(
            f"{some(late)} were registered after sharding and have the same gradient on every rank"
        )

    def detect(self, flow: Flow) -> Hits:
        late = {id(m): e for e, m in flow.shards}
        for event in flow.ops(STORE):
            if event.on is not None and ".__init__" not in event.function:
                added = [
                    v
                    for v in choices(event.args[0])
                    if has_parameters(flow, v) and id(v) not in late
                ]
                later = any(e.index > event.index and m is event.on for e, m in flow.shards)
                if added and not later and flow.sharded_by(event.on, event) is not None:
                    yield f"{text(event.node)} is set after its module was sharded", event
        peft = (e for e in flow.matching(lambda name: name.endswith("get_peft_model")) if e.args)
        added_to = (e for e in peft if flow.sharded_by(e.args[0], e) is not None)
        for event in (*(e for e in called_on_sharded(flow, *_ADDS) if e.op == ""), *added_to):
            yield (
                (
                    f"{event.method or 'get_peft_model'} adds parameters to a module that is"
                    " already sharded"
                ),
                event,
            )


# Methods of modules, transformers and peft that register parameters (faults
# params_added_after_shard*.yaml; pairs.yaml).
_ADDS = (
    "resize_token_embeddings",
    "add_module",
    "register_module",
    "register_parameter",
    "add_adapter",
)
