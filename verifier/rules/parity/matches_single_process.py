from ...analysis.wording import count
from ...evidence import Evidence
from ...finding import Finding
from ..base import Rule
from ._oracle import judge_against


class MatchesSingleProcess(Rule):
    """The script computes what one process computes on the whole global batch.

    Why: DDP shares every fault of the script itself: a mean of means, a split that loses samples, a statistic over
    the local batch only. One process with the same global batch shares none of them.
    Wrong:
        similarity = image @ text.T  # negatives from this rank's samples only
        loss = F.cross_entropy(similarity, torch.arange(len(image)))
    Right:
        everyone = torch.distributed.nn.functional.all_gather(text)
        similarity = image @ torch.cat(everyone).T
        start = dist.get_rank() * len(image)
        loss = F.cross_entropy(similarity, torch.arange(start, start + len(image)))
    Fix: Make the loss of a step a function of the global batch: divide by global counts, gather what samples need
    from each other.
    Source: the same script at world size 1 without FSDP. pytorch/torchtitan PR#1803 for the token form.
    """

    names_a_cause = False
    needs = frozenset({"train", "full_precision", "reference", "perturbed", "single"})

    def judge(self, evidence: Evidence) -> Finding:
        run, single = evidence.full_precision, evidence.single
        if run is not None and single is not None and run.steps() and single.steps():
            mine, theirs = run.global_batch(1), single.global_batch(1)
            if mine.total() != theirs.total():
                return self.unknown(
                    f"one process takes {count(theirs.total(), 'sample')} a step and {run.world_size} ranks take {mine.total()}: "
                    "the script does not keep its global batch, so there is nothing to compare (--single-args may tell it to)"
                )
        return judge_against(self, evidence, single, "single", "one process")
