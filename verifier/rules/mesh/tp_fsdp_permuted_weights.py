import math

from ...trace import Sketch, difference
from ...trace.events import Checkpoint, Step
from ..base import Evidence, Finding, Rule, count, some


class TpFsdpPermutedWeights(Rule):
    """A resume restores the values of a weight in the order in which they were saved.

    Why: under tensor parallelism and FSDP the shards of a weight are not in the order of the ranks
    (FSDP shards what tensor parallelism has sharded). Code that concatenates local shards by rank,
    or splits a fused weight again, permutes rows: all values are there, the shape fits, nothing is
    raised, and the trained model is lost.
    Wrong:
        weight = model.head.weight
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, weight.to_local())
        full = torch.cat(parts)  # by rank, ignoring the mesh
    Right:
        full = model.head.weight.full_tensor()
    Fix: Gather with `full_tensor()` or `get_model_state_dict(full_state_dict=True)`, and shard with
    `distribute_tensor` or `set_model_state_dict`; do not concatenate local shards.
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
        runs = [
            run
            for run in (evidence.resume, *evidence.reshards)
            if run is not None and run.at_step(Step, 1)
        ]
        for run in runs:
            mine = run.whole_state("weights", 1)
            wrong = [
                name
                for name, a in saved.items()
                if (b := mine.get(name)) is not None and _permuted(a, b)
            ]
            if wrong:
                which = f"{count(len(wrong), 'parameter')} of {len(saved)} ({some(wrong)})"
                what = (
                    f"after the resume on {count(run.world_size, 'rank')} {which} hold the saved"
                    " values in another order"
                )
                return self.failed(what, train.line_of(Checkpoint) or run.line_of(Checkpoint))
        if not runs or not saved:
            return self.unknown("no resumed run reached an optimizer step")
        order = f"all {count(len(saved), 'parameter')} keep the order of their saved values"
        return self.passed(f"{order} in {count(len(runs), 'resumed run')}")


def _permuted(saved: Sketch, found: Sketch) -> bool:
    """Whether two tensors have the same sum of squares and differ."""
    size = math.sqrt(saved[0])
    # The same values in another order have the same sum of squares, up to the order of summation in
    # float64 (faults tp_fsdp_permuted_weights*.yaml).
    same_values = abs(saved[0] - found[0]) <= 1e-9 * saved[0]
    # Random projections differ by the order: another order moves them by about the norm, rounding
    # by 1e-7 of it.
    return size > 0.0 and same_values and difference(saved, found) > 1e-3 * size
