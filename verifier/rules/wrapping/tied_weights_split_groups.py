import re
from collections.abc import Iterator

from ...analysis.root_cause import root_cause
from ...evidence import Evidence
from ...finding import Finding, Hit
from ...source.events import STORE, Flow
from ...source.looks import inner, text
from ...source.registry import detector
from ...source.values import root_of
from ...trace.events import Ties
from ..base import Rule


class TiedWeightsSplitGroups(Rule):
    """Parameters that are one tensor are one parameter of one group.

    Why: each group puts its own shards in the place of the parameters it finds. A weight that an embedding and a head
    share, taken by two groups, becomes two weights that train apart. torch 2.13 stops at the first forward with
    `is shared with a parameter already managed by another FSDP group`; older versions say nothing.
    Wrong:
        model.blocks[1].up.weight = model.blocks[0].up.weight  # tied, and then taken by two groups
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    Right:
        model.blocks[1].up.weight = model.blocks[0].up.weight
        fully_shard([model.blocks[0], model.blocks[1]])  # one group holds both ends of the tie
        fully_shard(model)
    Fix: Tie before sharding, and leave both modules to the root's group, or give them to one call:
    `fully_shard([embedding, head])`.
    Source: huggingface/accelerate PR#4171; pytorch/torchtitan#1524; huggingface/transformers PR#46707; pytorch#77724.
    Torch: run on 2.13.0 (the error, and the silent form with torch's check taken out) and 2.7.1 (silent).
    """

    wants = "run"
    simulated = True
    stops = re.compile(r"is shared with a parameter already managed by another FSDP group")

    def applies(self, evidence: Evidence) -> str:
        run = evidence.trained
        tied = any(True for _ in run.places(Ties))
        return "" if tied or not run.completed or not run.models else "no two parameters of the model are one tensor"

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        ties = [tie for record in run.places(Ties) for tie in record.ties]
        stopped = None if run.completed else root_cause(run)
        raised = stopped is not None and self.stops.search(stopped.error) is not None
        for tie in ties:
            if tie.parameters > 1:
                what = "torch stops on it" if raised else "each trains on its own"
                return self.failed(
                    f"{' and '.join(tie.names)} were one tensor when they were sharded, and are "
                    f"{tie.parameters} parameters of different groups in the model: {what}",
                    tie.line or evidence.line_of(run, Ties),
                )
        if raised and stopped is not None:
            return self.failed(stopped.text, stopped.location)
        if not ties:
            return self.unknown("no tie was seen before the run stopped")
        return self.passed(f"{' and '.join(ties[0].names)} are one parameter of one group")


@detector("tied-weights-split-groups")
def tied_weights_split_groups(flow: Flow) -> Iterator[Hit]:
    together = [
        {id(x) for x in inner(e.args[0])} for e, _ in flow.shards if e.args and e.args[0].kind in ("list", "tuple")
    ]
    for event in flow.ops(STORE):
        value = event.args[0]
        if event.method != "weight" or value.kind != "attr" or value.name != "weight" or event.on is None:
            continue
        one, other = event.on, value.owner
        if other is None or one is other or root_of(one) is not root_of(other):
            continue
        alone = [m for m in (one, other) if id(m) in flow.first_shard]
        joint = any(id(one) in group and id(other) in group for group in together)
        if alone and not joint:
            told = f"{text(event.node)} is tied to a weight of another module, and only one of the two is in the group"
            shard = flow.first_shard[id(alone[0])]
            yield flow.hit("tied-weights-split-groups", told, shard)
