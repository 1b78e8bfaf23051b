from ...trace.events import Recompute
from ..base import Evidence, Finding, Rule


class RecomputeDrawsAnew(Rule):
    """Activation checkpointing recomputes a forward with the same random numbers.

    Why: with `preserve_rng_state=False` the recomputed forward draws new dropout masks, so the
    gradient is not that of the loss that was computed. Nothing is raised and the loss still falls.
    The same happens with noise from a `torch.Generator` of the script's own, whose state activation
    checkpointing does not keep.
    Wrong:
        checkpoint, x = torch.utils.checkpoint.checkpoint, torch.randn(4, 8)
        for block in model.blocks:  # which have dropout
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
    Right:
        checkpoint, x = torch.utils.checkpoint.checkpoint, torch.randn(4, 8)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
    Fix: Leave `preserve_rng_state` at True (the default) wherever the checkpointed part draws, and
    draw from the default generator there, or before the checkpointed part. If a library sets it,
    turn off its activation checkpointing and checkpoint the blocks yourself, or set the dropout to
    0.
    Source: allenai/OLMo-core PR#828; allenai/OLMo PR#702; torchtitan#1323; `fsdp2_apply_ac` of
    accelerate 1.15.0.
    """

    def applies(self, evidence: Evidence) -> str:
        return (
            ""
            if evidence.trained.all(Recompute)
            else "no dropout or other draw was recomputed in a backward"
        )

    def judge(self, evidence: Evidence) -> Finding:
        seen = evidence.trained.all(Recompute)
        other = next((record for record in seen if not record.same), None)
        if other is None:
            return self.passed(
                f"what {seen[0].place} draws is recomputed with the random numbers of the forward"
            )
        text = (
            "is recomputed with other random numbers than in the forward: the gradient belongs to"
            " other masks"
        )
        return self.failed(f"what {other.place} draws {text}", other.at_line)
