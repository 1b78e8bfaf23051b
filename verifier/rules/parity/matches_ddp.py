from dataclasses import replace

from ...evidence import Evidence
from ...finding import Finding
from ...trace.events import Local
from ..base import Rule
from ._oracle import judge_against
from .matches_single_process import MatchesSingleProcess


class MatchesDdp(Rule):
    """The script computes what it computes when DDP takes the place of `fully_shard`.

    Why: FSDP2 changes where tensors lie, not what is computed. Losses, gradient norms, every first gradient and the
    weights after the last step must agree with data parallelism on whole tensors, up to the order of a sum.
    Wrong:
        for p in model.parameters():
            if p.ndim == 2:  # the mean over one rank's rows, another one on every rank
                grad = p.grad.to_local()
                grad.sub_(grad.mean(dim=0, keepdim=True))
    Right:
        for p in model.parameters():
            if p.ndim == 2:
                p.grad = p.grad - p.grad.mean(dim=0, keepdim=True)
    Fix: Compute anything that needs a whole tensor on the DTensor (then `full_tensor()`), never on `to_local()`.
    Source: `torch.nn.parallel.DistributedDataParallel` run on the same script by the probe's stand-in.
    """

    names_a_cause = False
    needs = frozenset({"train", "full_precision", "reference", "perturbed", "single"})

    def judge(self, evidence: Evidence) -> Finding:
        found = judge_against(self, evidence, evidence.reference, "reference", "DDP")
        if (prevented := evidence.missing.get("ddp")) is not None:
            told = found.evidence.replace("as DDP", "as each rank with the whole model and gradients averaged", 1)
            told = told.replace(
                "not what DDP computes", "not what ranks with the whole model and averaged gradients compute", 1
            )
            found = replace(found, evidence=f"{told} (DDP cannot stand in: {prevented})")
        return self._by_one_process(evidence, found) if found.status == "fail" else found

    def _by_one_process(self, evidence: Evidence, found: Finding) -> Finding:
        """A difference from DDP is a fault only where one process differs too: code on shards has no counterpart in DDP."""
        other = MatchesSingleProcess().judge(evidence)
        shard_code = evidence.line_of(evidence.reference, Local)
        if other.status == "fail" or (other.status == "inconclusive" and shard_code is None):
            return found
        where = "the script does what DDP has no counterpart for"
        if shard_code is not None:
            line = f"{shard_code.file.rpartition('/')[2]}:{shard_code.line}"
            where = f"{line} works on local shards, for which DDP has no counterpart"
        if other.status == "inconclusive":
            return self.unknown(f"{where}, and one process does not tell either: {other.evidence}")
        return self.passed(
            f"{where}; decided by one process: {other.evidence}", measured=other.measured, limit=other.limit
        )
