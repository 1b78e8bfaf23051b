from ...analysis.comparison import gradient_apart
from ...analysis.precision import low_precision
from ...analysis.wording import some
from ...evidence import Evidence
from ...finding import Finding
from ...trace.events import Micro
from ..base import Rule

LOW_MULTIPLE = 4.0  # activations are rounded too, not only weights


LOW_UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


class MatchesFullPrecision(Rule):
    """In low precision the first gradient is that of float32, up to what the rounding of the weights alone does.

    Why: bfloat16 and float16 are for matrix products. Positions, time steps, running sums, small differences and
    losses that are computed in them inside a module are silently wrong: in bfloat16 257 is 256, and an angle of 500
    is off by one. The comparisons with DDP and one process are made in float32 and cannot see it.
    Wrong:
        position = torch.arange(1024).to(torch.bfloat16)  # 1, 2, ... 256, 256, 258, 260, 260
        angle = position[:, None] * torch.logspace(0, -4, 8, dtype=torch.bfloat16)
        table = angle.sin()
    Right:
        position = torch.arange(1024, dtype=torch.float32)
        angle = position[:, None] * torch.logspace(0, -4, 8)
        table = angle.sin().to(torch.bfloat16)
    Fix: Compute positions, angles, sums over many elements, softmax statistics and the loss in float32, and cast the
    result.
    Source: the script without mixed precision, on the same weights and samples; the limit is measured with weights
    rounded to the script's dtype. Near huggingface/transformers#29496.
    """

    names_a_cause = False
    needs = frozenset({"train", "full_precision", "rounded_weights"})

    def applies(self, evidence: Evidence) -> str:
        return "" if low_precision(evidence.trained) else "the script computes in the dtype of its weights"

    def judge(self, evidence: Evidence) -> Finding:
        train, exact, dtype = evidence.trained, evidence.full_precision, low_precision(evidence.trained)
        if exact is None or dtype is None:
            return self.unknown(evidence.missing.get("full_precision", "no run in full precision was made"))
        low, rounded = evidence.plain, evidence.rounded_weights
        for run, role in ((low, "undropped"), (exact, "full_precision"), (rounded, "rounded_weights")):
            if run is None or run.steps() == 0:
                return self.unknown(f"the {role} run made no step")
            if run.global_batch(1) != exact.global_batch(1):
                return self.unknown(
                    f"the {role} run took its first step on other samples (a loss scaler that skips a step does that)"
                )
        assert low is not None and rounded is not None
        measured, worst = gradient_apart(low, exact)
        noise, _ = gradient_apart(rounded, exact)
        limit = evidence.times(self.name) * (LOW_MULTIPLE * noise + 2.0 * LOW_UNIT[dtype])
        if measured <= limit:
            return self.passed(
                f"the first gradient in {dtype} is within {measured:.1e} of float32; rounded weights give {noise:.1e}",
                measured=measured,
                limit=limit,
            )
        return self.failed(
            f"the first gradient in {dtype} is {measured:.1%} off that of float32, and weights rounded to {dtype} explain {noise:.1%}; "
            f"most in {some(worst)}",
            evidence.line_of(train, Micro),
            measured=measured,
            limit=limit,
        )
