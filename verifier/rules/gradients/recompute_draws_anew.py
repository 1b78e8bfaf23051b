from ...evidence import Evidence
from ...finding import Finding
from ...trace.events import Recompute
from ..base import Rule


class RecomputeDrawsAnew(Rule):
    """Activation checkpointing recomputes a forward with the same random numbers.

    Why: with `preserve_rng_state=False` the recomputed forward draws new dropout masks, so the gradient is not that of
    the loss that was computed. Nothing is raised and the loss still falls.
    Wrong:
        checkpoint, x = torch.utils.checkpoint.checkpoint, torch.randn(4, 8)
        for block in model.blocks:  # which have dropout
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
    Right:
        checkpoint, x = torch.utils.checkpoint.checkpoint, torch.randn(4, 8)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
    Fix: Leave `preserve_rng_state` at True (the default) wherever the checkpointed part has dropout. If a library sets
    it, turn off its activation checkpointing and checkpoint the blocks yourself, or set the dropout to 0.
    Source: allenai/OLMo-core PR#828; allenai/OLMo PR#702; torchtitan#1323; `fsdp2_apply_ac` of accelerate 1.15.0.
    """

    def applies(self, evidence: Evidence) -> str:
        seen = any(trace.first(Recompute) is not None for trace in evidence.trained.traces)
        return "" if seen else "no dropout was recomputed in a backward"

    def judge(self, evidence: Evidence) -> Finding:
        seen = [record for trace in evidence.trained.traces for record in trace.of(Recompute)]
        other = next((record for record in seen if not record.same), None)
        if other is None:
            return self.passed(f"dropout in {seen[0].place} is recomputed with the random numbers of the forward")
        text = "is recomputed with other random numbers than in the forward: the gradient belongs to other masks"
        return self.failed(f"dropout in {other.place} {text}", other.at_line)
