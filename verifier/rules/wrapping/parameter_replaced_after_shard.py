from collections.abc import Iterator

from ...analysis.root_cause import RootCause
from ...finding import Hit
from ...source.events import STORE, Flow
from ...source.looks import is_const, made_by, text
from ...source.registry import detector
from ...trace import Run
from ..raised import ShardedRule, last_shard


class ParameterReplacedAfterShard(ShardedRule):
    """No parameter object of a sharded model is replaced by another.

    Why: FSDP keeps the DTensor parameters that it made. A new `nn.Parameter` in their place (a new head, a resized
    embedding, `load_state_dict(..., assign=True)`) is none of its own, and the first gather fails.
    Wrong:
        shard(model)
        model.head.weight = nn.Parameter(torch.randn(16, 8))
        model(batch)  # raises AttributeError
    Right:
        model.head.weight = nn.Parameter(torch.randn(16, 8))
        shard(model)
        model(batch)
    Fix: Replace parameters (heads, embeddings, adapters) before `fully_shard`, and load without `assign=True` after it.
    Source: the message of torch 2.13.0 in `_fsdp_param.py`.
    """

    pattern = r"'(Parameter|Tensor)' object has no attribute '_local_tensor'"

    def fits(self, run: Run, cause: RootCause) -> bool:
        return last_shard(run) is not None


@detector("parameter-replaced-after-shard")
def parameter_replaced(flow: Flow) -> Iterator[Hit]:
    for event in flow.ops(STORE):
        value = event.args[0]
        outside = event.on is not None and ".__init__" not in event.function and event.method in ("weight", "bias")
        if not outside or event.on is None or made_by(value, "torch.nn.Parameter") is None:
            continue
        if flow.managed_by(event.on, event) is not None:
            told = f"{text(event.node)} is replaced after fully_shard has taken the old one"
            yield flow.hit("parameter-replaced-after-shard", told, event)
    for event in flow.methods("load_state_dict"):
        assign = event.kwargs.get("assign")
        if (
            event.on is not None
            and assign is not None
            and is_const(assign, True)
            and flow.sharded_by(event.on, event) is not None
        ):
            told = f"{text(event.node)} puts other parameters in the place of the sharded ones"
            yield flow.hit("parameter-replaced-after-shard", told, event)
