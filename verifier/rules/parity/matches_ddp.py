import re
from dataclasses import replace

from ...analysis.unusual_parallelism import divided_by_script
from ...trace.events import Local
from ..base import Evidence, Finding, some
from ._oracle import OracleRule, judge_against
from .matches_single_process import MatchesSingleProcess


class MatchesDdp(OracleRule):
    """The result equals that of the same script with DDP in place of `fully_shard`.

    Why: FSDP2 changes where tensors are stored, not what is computed. Losses, gradient norms, the
    gradients of step 1 and the weights after the last step must agree with DDP on whole tensors, up
    to the order of summation.
    Wrong:
        for p in model.parameters():
            if p.ndim == 2:  # the mean of one rank's rows: it differs between ranks
                grad = p.grad.to_local()
                grad.sub_(grad.mean(dim=0, keepdim=True))
    Right:
        for p in model.parameters():
            if p.ndim == 2:
                p.grad = p.grad - p.grad.mean(dim=0, keepdim=True)
    Fix: Compute anything that needs a whole tensor on the DTensor (then `full_tensor()`), never on
    `to_local()`.
    Source: the same script under `torch.nn.parallel.DistributedDataParallel`, which the probe
    substitutes.
    """

    def judge(self, evidence: Evidence) -> Finding:
        found = judge_against(self, evidence, "reference", "DDP")
        if (prevented := evidence.missing.get("ddp")) is not None:
            used = r"\1 the whole model on each rank with gradients averaged"
            text = re.sub(r"^(agrees with|differs from) DDP", used, found.evidence)
            found = replace(found, evidence=f"{text} (DDP cannot run this script: {prevented})")
        if evidence.reference is not None and not evidence.reference.completed:
            other = MatchesSingleProcess().judge(evidence)
            # Where DDP cannot run the script (e.g. an optimizer of shards), the rule has no second
            # opinion to give: if one process agrees it does not apply (exam round 6 t_11_muon_lm:
            # right, inconclusive: DDP did not complete).
            decided = found.status == "inconclusive" and other.status == "pass"
            why = found.evidence.removesuffix("; only the other oracles are compared")
            return self.not_applicable(f"{why}; one process agrees") if decided else found
        if found.status != "fail":
            return found
        # A table that the script divides over ranks itself has another part on each: DDP would
        # average these parts, so its result is no oracle (exam round 6 w_14_rowparallel_table).
        if own := divided_by_script(evidence):
            return self.not_applicable(
                f"DDP averages {some(sorted(own))}, of which the script gives each rank a part"
            )
        # This is a fault only where one process differs too: code on local shards has no DDP
        # equivalent.
        other = MatchesSingleProcess().judge(evidence)
        line = evidence.reference.line_of(Local) if evidence.reference is not None else None
        # Code on local shards has no equivalent under DDP (whole tensors on each rank). It is a
        # fault only where one process differs too, or where nothing explains the difference.
        if other.status == "fail" or (other.status == "inconclusive" and line is None):
            return found
        where = (
            f"code on local shards at {line.file.rpartition('/')[2]}:{line.line}"
            if line
            else "code of this script"
        )
        if other.status == "inconclusive":
            return self.unknown(
                f"{where} has no DDP equivalent, and one process is inconclusive: {other.evidence}"
            )
        text = f"{where} has no DDP equivalent; judged by one process: {other.evidence}"
        return self.passed(text, measured=other.measured, limit=other.limit)
