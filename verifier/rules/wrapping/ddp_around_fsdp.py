from ...source.flow_queries import text
from ..base import Flow, Hits, RootCause, Run
from ..raised import MIXED, MixedRule, wrapped_in_ddp
from ._base import given_a_sharded


class DdpAroundFsdp(MixedRule):
    """A model is sharded by `fully_shard` or wrapped in DDP, never both.

    Why: DDP broadcasts and averages plain tensors and cannot handle DTensors, and FSDP already
    averages gradients.
    Wrong:
        shard(model)
        model = nn.parallel.DistributedDataParallel(model)  # raises RuntimeError
    Right:
        shard(model)
    Fix: Remove DistributedDataParallel; for replicas of shards give `fully_shard` a 2-D mesh.
    Source: the documentation of `fully_shard` (HSDP by a 2-D mesh).
    """

    named_by = ("DistributedDataParallel", "DataParallel")
    pattern = rf"{MIXED}|does not have a sharding strategy registered"

    def fits(self, run: Run, cause: RootCause) -> bool:
        return wrapped_in_ddp(run, cause)

    def detect(self, flow: Flow) -> Hits:
        for event in given_a_sharded(
            flow, "torch.nn.parallel.DistributedDataParallel", "torch.nn.DataParallel"
        ):
            yield f"{text(event.node)} wraps a model that is already sharded", event
