from ...source.events import CALL, Flow
from ...source.flow_queries import is_const, text
from ..base import Hits
from ..raised import MixedRule


class WeightUsedOutsideForward(MixedRule):
    """A sharded weight is used as a tensor only inside the forward of the FSDP module that owns it.

    Why: outside, `model.head.weight` is a DTensor that holds a shard, and torch does not mix it
    with plain tensors: in a fused linear and cross entropy, a tied projection, a weight penalty, or
    a moving average of plain tensors.
    Wrong:
        hidden = torch.randn(4, 8)
        logits = F.linear(hidden, model.head.weight)  # raises RuntimeError
    Right:
        logits = model(batch)  # the forward uses the head
    Fix: Compute inside the forward of the FSDP module that owns the weight; for a moving average
    copy the sharded model.
    Source: meta-pytorch/torchtune PR#2800; apple/ml-cross-entropy#31; linkedin/Liger-Kernel#332.
    """

    def detect(self, flow: Flow) -> Hits:
        for event in flow.ops(*_MATRIX):
            if event.function.rpartition(".")[2] == "forward":
                continue
            for value in event.given():
                if (
                    value.kind != "attr"
                    or value.name not in ("weight", "bias")
                    or value.owner is None
                ):
                    continue
                shard = flow.sharded_by(value.owner, event)
                kept = (
                    shard is None
                    or shard.open
                    or is_const(shard.kwargs.get("reshard_after_forward"), False)
                )
                called = any(value.owner is call.on for call in flow.ops(CALL))
                if not kept and not called and not flow.methods("unshard"):
                    yield (
                        f"{text(event.node)} uses a sharded weight outside of its module's forward",
                        event,
                    )
                    break


_MATRIX = ("F.linear", "F.embedding", "torch.matmul", "torch.mm", "torch.einsum", "F.layer_norm")
