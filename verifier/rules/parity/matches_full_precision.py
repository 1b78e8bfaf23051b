import math

from ...analysis.comparison import gradient_apart
from ...analysis.precision import low_precision
from ...tolerances import LOW_MULTIPLE, LOW_UNIT
from ...trace.events import Micro
from ..base import Evidence, Finding, Rule, some


class MatchesFullPrecision(Rule):
    """In low precision the first gradient equals that of float32, up to the rounding of the
    weights.

    Why: bfloat16 and float16 are for matrix products. Positions, time steps, running sums, small
    differences and losses computed in them inside a module are silently wrong: 257 becomes 256 in
    bfloat16, and an angle of 500 is off by one. The comparisons with DDP and one process run in
    float32 and cannot show it.
    Wrong:
        position = torch.arange(1024).to(torch.bfloat16)  # 1, 2, ... 256, 256, 258, 260, 260
        angle = position[:, None] * torch.logspace(0, -4, 8, dtype=torch.bfloat16)
        table = angle.sin()
    Right:
        position = torch.arange(1024, dtype=torch.float32)
        angle = position[:, None] * torch.logspace(0, -4, 8)
        table = angle.sin().to(torch.bfloat16)
    Fix: Compute positions, angles, long sums, softmax statistics and the loss in float32, and cast
    the result.
    Source: the script without mixed precision, on the same weights and samples; the limit is
    measured with weights rounded to the script's dtype. Near huggingface/transformers#29496.
    """

    names_a_cause = False
    needs = frozenset({"train", "full_precision", "rounded_weights"})

    def applies(self, evidence: Evidence) -> str:
        return (
            ""
            if low_precision(evidence.trained)
            else "the script computes in the dtype of its weights"
        )

    def judge(self, evidence: Evidence) -> Finding:
        full, dtype = evidence.full_precision, low_precision(evidence.trained)
        if full is None or dtype is None:
            return self.unknown(
                evidence.missing.get("full_precision", "no run in full precision was made")
            )
        low, rounded = evidence.plain, evidence.rounded_weights
        for run, role in (
            (rounded, "rounded_weights"),
            (low, "undropped"),
            (full, "full_precision"),
        ):
            if run is None or run.steps() == 0:
                return self.unknown(evidence.missing.get(role, f"the {role} run made no step"))
            # A GradScaler may skip the first step for overflow: then the first step that counts is
            # on other samples, and its gradient cannot be compared (zoo/fp16_scaler.py).
            if run.global_batch(1) != full.global_batch(1):
                skips = "(a loss scaler that skips a step causes this)"
                return self.unknown(f"the {role} run took its first step on other samples {skips}")
        assert low is not None and rounded is not None
        measured, worst = gradient_apart(low, full)
        noise, _ = gradient_apart(rounded, full)
        limit = evidence.times(self.name) * (LOW_MULTIPLE * noise + 2.0 * LOW_UNIT[dtype])
        if not math.isfinite(measured):
            return self.unknown("the first gradient is not finite, in float32 or as it is trained")
        text = f"the first gradient in {dtype} is {measured:.2%} off float32"
        text += f" (allowed: {limit:.2%}; rounded weights explain {noise:.2%})"
        if measured <= limit:
            return self.passed(text, measured=measured, limit=limit)
        line = evidence.trained.line_of(Micro)
        return self.failed(f"{text}; most in {some(worst)}", line, measured=measured, limit=limit)
