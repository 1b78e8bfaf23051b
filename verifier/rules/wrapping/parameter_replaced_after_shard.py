from ...source.events import STORE, Flow
from ...source.flow_queries import is_const, made_by, text
from ..base import Hits
from ..policies import AfterSharding
from ..raised import ShardedRule
from ._base import called_on_sharded

# Only whole tensors from a file replace shards by plain tensors with assign=True; DTensors may be
# assigned before the optimizer is built (zoo scripts that assign DTensors).
_PLAIN_FILES = ("torch.load", "safetensors.torch.load_file")


class ParameterReplacedAfterShard(ShardedRule):
    """No parameter object of a model is replaced after sharding.

    Why: FSDP keeps references to the DTensor parameters that it made. After a replacement by a new
    `nn.Parameter` (a new head, a resized embedding, `load_state_dict(plain tensors, assign=True)`)
    the first gather fails.
    Wrong:
        shard(model)
        model.head.weight = nn.Parameter(torch.randn(16, 8))
        model(batch)  # raises AttributeError
    Right:
        model.head.weight = nn.Parameter(torch.randn(16, 8))
        shard(model)
        model(batch)
    Fix: Replace parameters (heads, embeddings, adapters) before `fully_shard`, and load plain
    tensors without `assign=True` after
        it.
    Source: the message of torch 2.13.0 in `_fsdp_param.py`.
    """

    pattern = r"'(Parameter|Tensor)' object has no attribute '_local_tensor'"
    policies = (AfterSharding(),)

    def detect(self, flow: Flow) -> Hits:
        for event in flow.ops(STORE):
            outside = ".__init__" not in event.function and event.method in ("weight", "bias")
            if (
                event.on is None
                or not outside
                or made_by(event.args[0], "torch.nn.Parameter") is None
            ):
                continue
            if flow.managed_by(event.on, event) is not None:
                yield f"{text(event.node)} is replaced after fully_shard sharded it", event
        for event in called_on_sharded(flow, "load_state_dict"):
            # DTensors may be assigned before the optimizer is built
            plain = made_by(next(iter(event.args), None), *_PLAIN_FILES)
            if plain is not None and is_const(event.kwargs.get("assign"), True):
                yield f"{text(event.node)} replaces the sharded parameters", event
