import math

from ...analysis.wording import count, some
from ...evidence import Evidence
from ...finding import Finding
from ...trace import Sketch, difference
from ...trace.events import Checkpoint, Step
from ..base import Rule


class TpFsdpPermutedWeights(Rule):
    """Weights come back from a checkpoint in the order in which they were saved.

    Why: under tensor parallelism and FSDP the shards of a weight do not lie in the order of the ranks (FSDP cuts what
    tensor parallelism has cut before). Code that gathers local shards and joins them by rank, or cuts a fused weight
    anew, permutes rows: every value is there, the shape fits, nothing is raised, and the model has forgotten all.
    Wrong:
        weight = model.head.weight
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, weight.to_local())
        full = torch.cat(parts)  # by rank, whatever the mesh
    Right:
        full = model.head.weight.full_tensor()
    Fix: Gather with `full_tensor()` or `get_model_state_dict(full_state_dict=True)`, and cut with `distribute_tensor`
    or `set_model_state_dict`; do not join local shards by hand.
    Source: pytorch#129206, PR#130760; pytorch/torchtitan PR#1483.
    """

    needs = frozenset({"train", "resume", "resume_full_precision", "reshard"})

    def judge(self, evidence: Evidence) -> Finding:
        after = evidence.saved_after()
        train = evidence.trained
        if evidence.resume is None and not evidence.reshards:
            return self.unknown(evidence.missing.get("resume", "the script was not resumed"))
        if after is None:
            return self.unknown("the train run saved nothing before its last step")
        saved = train.whole_state("weights", after + 1)
        looked = 0
        for run in (evidence.resume, *evidence.reshards):
            if run is None or not run.at_step(Step, 1):
                continue
            mine = run.whole_state("weights", 1)
            looked += 1
            wrong = [name for name, a in saved.items() if (b := mine.get(name)) is not None and _permuted(a, b)]
            if wrong:
                return self.failed(
                    f"after the resume on {count(run.world_size, 'rank')} {count(len(wrong), 'parameter')} of {len(saved)} "
                    f"({some(wrong)}) hold the values that were saved, in another order",
                    evidence.line_of(train, Checkpoint) or evidence.line_of(run, Checkpoint),
                )
        if not looked or not saved:
            return self.unknown("no resumed run came to an optimizer step")
        return self.passed(
            f"no parameter of {len(saved)} holds its saved values in another order, in {count(looked, 'resumed run')}"
        )


def _permuted(saved: Sketch, found: Sketch) -> bool:
    """Whether two tensors have the same sum of squares and are far apart."""
    size = math.sqrt(saved[0])
    same_values = abs(saved[0] - found[0]) <= 1e-9 * saved[0]
    return size > 0.0 and same_values and difference(saved, found) > 1e-3 * size
