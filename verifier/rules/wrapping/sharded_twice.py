from ...source.events import Flow, covers
from ...source.flow_queries import is_known, text
from ...source.values import root_of
from ..base import Hits
from ..raised import ShardedRule


class ShardedTwice(ShardedRule):
    """`fully_shard` is called once on a module.

    Seen: `can only be applied to a module once. fully_shard has already been applied`
    Why: the first call already manages the parameters; torch raises an error that prints the whole
    module. Typical causes are a loop over `model.modules()`, which includes the root, and a helper
    that shards too.
    Wrong:
        shard(model)
        fully_shard(model)  # raises AssertionError
    Right:
        shard(model)
    Fix: Remove the second call, or exclude the module from the loop.
    Source: the message of torch 2.13.0 in `torch/distributed/_composable/contract.py`.
    """

    pattern = r"can only be applied to a module once\. fully_shard has already been applied"

    def detect(self, flow: Flow) -> Hits:
        for event, module in flow.shards:
            first = flow.first_shard[id(module)]
            if (
                first is not event
                and root_of(module) is module
                and is_known(flow, module)
                and covers(first, event)
            ):
                yield f"{text(event.node)}: already sharded in line {first.line}", event
