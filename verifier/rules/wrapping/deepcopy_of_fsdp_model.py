from collections.abc import Iterator

from ...finding import Hit
from ...source.events import Flow
from ...source.looks import text
from ...source.registry import detector
from ..base import RaisedRule
from ._base import given_sharded


class DeepcopyOfFsdpModel(RaisedRule):
    """A model is copied before it is sharded.

    Why: an FSDP module holds groups and hooks that a copy cannot share, so `copy.deepcopy`, and `AveragedModel` which
    calls it, raise on a sharded model.
    Wrong:
        import copy

        shard(model)
        average = copy.deepcopy(model)  # raises AssertionError
    Right:
        import copy

        average = copy.deepcopy(model)
        shard(model)
        shard(average)
    Fix: Copy before `fully_shard` and shard both; the weights of the copy are then DTensors of the same layout.
    Source: pytorch#149138; pytorch#82070.
    """

    named_by = ("deepcopy", "AveragedModel")
    pattern = r"FSDP does not support deepcopy"


@detector("deepcopy-of-fsdp-model")
def deepcopy_of_model(flow: Flow) -> Iterator[Hit]:
    for event in given_sharded(flow, "copy.deepcopy", "torch.optim.swa_utils.AveragedModel"):
        yield flow.hit("deepcopy-of-fsdp-model", f"{text(event.node)} copies a model that is already sharded", event)
