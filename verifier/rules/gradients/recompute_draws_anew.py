from ...evidence import Evidence
from ...finding import Finding
from ...trace.events import Recompute
from ..base import Rule


class RecomputeDrawsAnew(Rule):
    """A forward that activation checkpointing recomputes draws the random numbers of the first forward.

    Why: with `preserve_rng_state=False` every dropout of the recompute has a new mask, so the gradient is that of
    another function than the one whose loss was computed. Nothing is raised and the loss still falls.
    Wrong:
        checkpoint, x = torch.utils.checkpoint.checkpoint, torch.randn(4, 8)
        for block in model.blocks:  # which have dropout
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
    Right:
        checkpoint, x = torch.utils.checkpoint.checkpoint, torch.randn(4, 8)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
    Fix: Leave `preserve_rng_state` at True (its default) wherever the checkpointed part has dropout. If a library sets
    it, turn its activation checkpointing off and checkpoint the blocks yourself, or set the dropout to 0.
    Source: allenai/OLMo-core PR#828; allenai/OLMo PR#702; pytorch/torchtitan#1323; measured on accelerate 1.15.0
    (`fsdp2_apply_ac`).
    """

    def applies(self, evidence: Evidence) -> str:
        seen = any(trace.first(Recompute) is not None for trace in evidence.trained.traces)
        return "" if seen else "no dropout was recomputed in a backward"

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        seen = [record for trace in run.traces for record in trace.of(Recompute)]
        for record in seen:
            if not record.same:
                return self.failed(
                    f"a recomputed forward met other random numbers than the first one (dropout in {record.place}): "
                    "its gradient is that of other masks than its loss",
                    record.at_line,
                )
        return self.passed(f"dropout in {seen[0].place} is recomputed with the random numbers of the forward")
