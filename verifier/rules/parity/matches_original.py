from ...analysis.wording import count
from ...evidence import Evidence
from ...finding import Finding
from ..base import Rule
from ._oracle import judge_against


class MatchesOriginal(Rule):
    """The script computes what the script that it was converted from computes.

    Why: DDP, one process and the converted script share whatever the conversion lost: a learning rate, a parameter
    group, a clip, a dropout rate, a schedule that counts micro-batches. Only the original has it.
    Wrong:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # the original decays no norms and biases
    Right:
        decayed = [p for p in model.parameters() if p.ndim >= 2]
        others = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
    Fix: Compare optimizer, parameter groups, schedule, clipping and loss with those of the original, line by line.
    Source: the original script, run as it is (`--reference "SCRIPT ARGS"`), from the same weights.
    """

    names_a_cause = False
    needs = frozenset({"train", "full_precision", "reference", "perturbed", "single", "original"})

    def applies(self, evidence: Evidence) -> str:
        if evidence.original is not None or "original" in evidence.missing:
            return ""
        return "no script is named that this one was converted from (--reference)"

    def judge(self, evidence: Evidence) -> Finding:
        original, run = evidence.original, evidence.full_precision
        if original is not None and run is not None and original.steps() and run.steps():
            theirs, mine = original.global_batch(1), run.global_batch(1)
            if theirs.total() != mine.total():
                return self.unknown(
                    f"the original takes {count(theirs.total(), 'sample')} a step and this script {mine.total()}: "
                    "give both the same global batch"
                )
        return judge_against(self, evidence, original, "original", "the original")
