from ...analysis.applicability import unnamed
from ...source.flow_queries import made_by, text
from ...trace.events import Shard
from ..base import Evidence, Finding, Flow, Hits
from ._base import ShardedModelRule


class ShardOptionUnread(ShardedModelRule):
    """Options of `fully_shard` have the types that it reads.

    Why: it reads a `CPUOffloadPolicy` in `offload_policy` and parameters in `ignored_params`, and
    silently ignores anything else. FSDP1's `CPUOffload` offloads nothing; a module in
    `ignored_params` is sharded and trained.
    Wrong:
        model = Decoder()
        # a module: its weight is sharded nevertheless
        fully_shard(model, ignored_params={model.head})
    Right:
        model = Decoder()
        fully_shard(model, ignored_params=set(model.head.parameters()))
    Fix: Give `offload_policy=CPUOffloadPolicy()`; give the parameters themselves:
    `set(module.parameters())`.
    Source: hiyazakite/raylight 10dca8d (FSDP1's `CPUOffload`); the docstring of `fully_shard`;
    FSDP1's options are in pytorch/torchtitan docs/fsdp.md.
    """

    explains = ("op-without-sharding-strategy",)

    wants = "run"
    simulated = True
    named_by = ("offload_policy", "ignored_params")

    def applies(self, evidence: Evidence) -> str:
        return super().applies(evidence) or unnamed(evidence.sources, *self.named_by)

    def judge(self, evidence: Evidence) -> Finding:
        shards = evidence.trained.places(Shard)
        if not shards:
            return self.unknown("no call of fully_shard was seen")
        if (record := next((r for r in shards if r.unread), None)) is not None:
            return self.failed("; ".join(record.unread), record.at_line)
        return self.passed("every option of fully_shard has a type that it reads")

    def detect(self, flow: Flow) -> Hits:
        for event, _ in flow.shards:
            if made_by(event.kwargs.get("offload_policy"), "fsdp.CPUOffload") is not None:
                what = "FSDP1's CPUOffload is not a CPUOffloadPolicy, so nothing is offloaded"
                yield f"{text(event.node)}: {what}", event
