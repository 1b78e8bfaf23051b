from ..base import Evidence, Finding
from ._oracle import OracleRule, judge_against


class MatchesOriginal(OracleRule):
    """The result equals that of the script from which this one was converted.

    Why: DDP and one process run the converted script, so they lack whatever the conversion lost: a
    learning rate, a parameter group, clipping, a dropout rate, a schedule that counts
    micro-batches. Only the original shows it.
    Wrong:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # decays norms, too
    Right:
        decayed = [p for p in model.parameters() if p.ndim >= 2]
        others = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
    Fix: Compare optimizer, parameter groups, schedule, clipping and loss with those of the
    original, line by line.
    Source: the original script, run unmodified from the same weights (`--reference "SCRIPT ARGS"`).
    """

    in_windows = False
    needs = OracleRule.needs | {"original"}

    def applies(self, evidence: Evidence) -> str:
        known = evidence.original is not None or "original" in evidence.missing
        return "" if known else "no original script is given (--reference)"

    def judge(self, evidence: Evidence) -> Finding:
        return judge_against(
            self, evidence, "original", "the original", "give both the same global batch"
        )
