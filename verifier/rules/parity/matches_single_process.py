from ...analysis.ending import weights_apart
from ...analysis.unusual_parallelism import parts_and_meets
from ...tolerances import SAME_END
from ..base import Evidence, Finding
from ._oracle import OracleRule, judge_against


class MatchesSingleProcess(OracleRule):
    """The result equals that of one process on the whole global batch.

    Why: DDP shares the faults of the script itself: a mean of per-rank means, a data split that
    drops samples, a statistic over the local batch. One process with the same global batch has none
    of them.
    Wrong:
        similarity = image @ text.T  # negatives from this rank's samples only
        loss = F.cross_entropy(similarity, torch.arange(len(image)))
    Right:
        everyone = torch.distributed.nn.functional.all_gather(text)
        similarity = image @ torch.cat(everyone).T
        start = dist.get_rank() * len(image)
        loss = F.cross_entropy(similarity, torch.arange(start, start + len(image)))
    Fix: Compute the loss over the global batch: divide by global counts, all-gather what samples
    need of each other.
    Source: the same script at world size 1 without FSDP. pytorch/torchtitan PR#1803 for the token
    form.
    """

    reads = frozenset({"ending"})

    def judge(self, evidence: Evidence) -> Finding:
        same_batch = (
            "the global batch depends on the number of ranks (--single-args can set that of one"
            " process)"
        )
        found = judge_against(self, evidence, "single", "one process", same_batch)
        # A bias whose gradient cancels is rounding, of which Adam makes whole updates: the first
        # steps part. If the whole training ends with the same weights (1e-4), nothing was wrong
        # (exam round 11 mc_01_twotower_init twin).
        if found.status == "fail" and (far := weights_apart(evidence, evidence.ending)) <= SAME_END:
            same = (
                f"at the end of the script the weights are those of one process ({far:.1e} apart,"
                f" allowed: {SAME_END:.0e})"
            )
            return self.passed(
                f"{same}: the first steps differ by rounding", measured=far, limit=SAME_END
            )
        # Replicas that train apart and meet every few steps (DiLoCo, local SGD) are another
        # algorithm than one process, on purpose: inconclusive, not a failure (exam round 6
        # w_19_diloco).
        if found.status == "fail" and parts_and_meets(evidence.trained):
            apart = (
                "copies of the model part in training and are made equal again by the script: one"
                " process trains otherwise"
            )
            return self.unknown(apart)
        return found
