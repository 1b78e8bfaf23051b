import re

from ...analysis.root_cause import root_cause
from ...source.events import STORE, Flow
from ...source.flow_queries import inner, text
from ...source.values import root_of
from ...trace.events import Ties
from ..base import Evidence, Finding, Hits, Rule


class TiedWeightsSplitGroups(Rule):
    """Tied weights are one parameter of one group.

    Why: each group replaces its parameters by its own shards. A weight that an embedding and a head
    share becomes, in two groups, two weights that train separately. torch 2.13 raises at the first
    forward with `is shared with a parameter already managed by another FSDP group`; older versions
    raise nothing.
    Wrong:
        model.blocks[1].up.weight = model.blocks[0].up.weight  # tied, but sharded in two groups
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    Right:
        model.blocks[1].up.weight = model.blocks[0].up.weight
        fully_shard([model.blocks[0], model.blocks[1]])  # one group holds both ends of the tie
        fully_shard(model)
    Fix: Tie before sharding, and leave both modules to the root or call `fully_shard([embedding,
    head])`.
    Source: huggingface/accelerate PR#4171; pytorch/torchtitan#1524; huggingface/transformers
    PR#46707; pytorch#77724.
    Torch: run on 2.13.0 (the error, and silent with torch's check removed) and 2.7.1 (silent).
    """

    explains = ("run-completes",)  # torch refuses a parameter of two groups
    wants = "run"
    simulated = True
    stops = re.compile(r"is shared with a parameter already managed by another FSDP group")

    def applies(self, evidence: Evidence) -> str:
        run = evidence.trained
        tied = run.places(Ties)
        return (
            ""
            if tied or not run.completed or not run.models
            else "no two parameters of the model are one tensor"
        )

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        ties = [tie for record in run.places(Ties) for tie in record.ties]
        stopped = None if run.completed else root_cause(run)
        raised = stopped is not None and self.stops.search(stopped.error) is not None
        # A tie that is still one parameter of one group is right, however many names it has
        # (zoo/tied_embeddings.py).
        if (split := next((tie for tie in ties if tie.parameters > 1), None)) is not None:
            names, what = (
                " and ".join(split.names),
                "torch raised an error" if raised else "each trains separately",
            )
            now = f"are now {split.parameters} parameters of different groups: {what}"
            return self.failed(
                f"{names} were tied when sharded, and {now}", split.line or run.line_of(Ties)
            )
        if raised and stopped is not None:
            return self.failed(stopped.text, stopped.location)
        if not ties:
            return self.unknown("no tie was seen before the run stopped")
        return self.passed(f"{' and '.join(ties[0].names)} are one parameter of one group")

    def detect(self, flow: Flow) -> Hits:
        lists = [
            event.args[0]
            for event, _ in flow.shards
            if event.args and event.args[0].kind in ("list", "tuple")
        ]
        together = [{id(module) for module in inner(given)} for given in lists]
        for event in flow.ops(STORE):
            value = event.args[0]
            if (
                event.method != "weight"
                or value.kind != "attr"
                or value.name != "weight"
                or event.on is None
            ):
                continue
            one, other = event.on, value.owner
            if other is None or one is other or root_of(one) is not root_of(other):
                continue
            alone = [m for m in (one, other) if id(m) in flow.first_shard]
            # fully_shard([embedding, head]) puts both into one group (zoo/tied_embeddings.py).
            joint = any(id(one) in group and id(other) in group for group in together)
            if alone and not joint:
                what = (
                    f"{text(event.node)} is tied to a weight of another module, and the two are not"
                    " in one group"
                )
                yield what, flow.first_shard[id(alone[0])]
