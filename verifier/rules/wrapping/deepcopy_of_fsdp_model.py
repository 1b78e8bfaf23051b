from ...source.flow_queries import text
from ..base import Flow, Hits, RaisedRule
from ._base import given_a_sharded


class DeepcopyOfFsdpModel(RaisedRule):
    """A model is copied before it is sharded.

    Why: a copy cannot share FSDP's groups and hooks: `copy.deepcopy`, which `AveragedModel` calls
    too, raises an error.
    Wrong:
        import copy

        shard(model)
        average = copy.deepcopy(model)  # raises AssertionError
    Right:
        import copy

        average = copy.deepcopy(model)
        shard(model)
        shard(average)
    Fix: Copy before `fully_shard` and shard both; the weights of the copy are then DTensors of the
    same layout.
    Source: pytorch#149138; pytorch#82070.
    """

    named_by = ("deepcopy", "AveragedModel")
    pattern = r"FSDP does not support deepcopy"

    def detect(self, flow: Flow) -> Hits:
        for event in given_a_sharded(flow, "copy.deepcopy", "torch.optim.swa_utils.AveragedModel"):
            yield f"{text(event.node)} copies a model that is already sharded", event
