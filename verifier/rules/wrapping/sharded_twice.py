from collections.abc import Iterator

from ...finding import Hit
from ...source.events import Flow, covers
from ...source.looks import is_known, text
from ...source.registry import detector
from ...source.values import root_of
from ..raised import ShardedRule


class ShardedTwice(ShardedRule):
    """`fully_shard` is called once on a module.

    Why: the second call would manage the parameters that the first one has; torch refuses it with the whole module
    as text. It comes from a loop over `model.modules()` that meets the root, or from a helper that shards inside.
    Wrong:
        shard(model)
        fully_shard(model)  # raises AssertionError
    Right:
        shard(model)
    Fix: Delete the second call, or leave the module out of the loop.
    Source: the message of torch 2.13.0 in `torch/distributed/_composable/contract.py`.
    """

    pattern = r"can only be applied to a module once\. fully_shard has already been applied"


@detector("sharded-twice")
def sharded_twice(flow: Flow) -> Iterator[Hit]:
    for event, module in flow.shards:
        first = flow.first_shard[id(module)]
        if first is not event and root_of(module) is module and is_known(flow, module) and covers(first, event):
            yield flow.hit("sharded-twice", f"{text(event.node)}: it was sharded in line {first.line} already", event)
