from collections.abc import Iterator

from ...analysis.presence import unnamed, unsharded
from ...evidence import Evidence
from ...finding import Finding, Hit
from ...source.events import Flow
from ...source.looks import made_by, text
from ...source.registry import detector
from ...trace.events import Shard
from ..base import Rule


class ShardOptionUnread(Rule):
    """What `fully_shard` is given for an option is of the kind that it reads.

    Why: it looks for a `CPUOffloadPolicy` in `offload_policy` and for parameters in `ignored_params`, and passes over
    anything else without a word. FSDP1's `CPUOffload` offloads nothing; a module in `ignored_params` is sharded and
    trained like the rest.
    Wrong:
        model = Decoder()
        fully_shard(model, ignored_params={model.head})  # a module: its weight is sharded all the same
    Right:
        model = Decoder()
        fully_shard(model, ignored_params=set(model.head.parameters()))
    Fix: Give `offload_policy=CPUOffloadPolicy()`; give the parameters themselves: `set(module.parameters())`.
    Source: the docstring of `fully_shard`; FSDP1's options are in pytorch/torchtitan docs/fsdp.md.
    """

    explains = ("op-without-sharding-strategy",)

    wants = "run"
    simulated = True
    named_by = ("offload_policy", "ignored_params")

    def applies(self, evidence: Evidence) -> str:
        return unsharded(evidence.trained) or unnamed(evidence.sources, *self.named_by)

    def judge(self, evidence: Evidence) -> Finding:
        shards = list(evidence.trained.places(Shard))
        if not shards:
            return self.unknown("no fully_shard was seen")
        for record in shards:
            if record.unread:
                return self.failed("; ".join(record.unread), record.at_line)
        return self.passed("every option that was given to fully_shard is of the kind that it reads")


@detector("shard-option-unread")
def option_unread(flow: Flow) -> Iterator[Hit]:
    for event, _ in flow.shards:
        if made_by(event.kwargs.get("offload_policy"), "fsdp.CPUOffload") is not None:
            told = f"{text(event.node)}: FSDP1's CPUOffload is no CPUOffloadPolicy: nothing is offloaded"
            yield flow.hit("shard-option-unread", told, event)
