import math
from collections.abc import Iterator

from ...analysis.wording import count
from ...evidence import Evidence
from ...finding import Finding, Hit
from ...source.events import Flow
from ...source.looks import LOW_DTYPES, identifiers, is_dtype, text, trains
from ...source.looks_precision import POLICY, policies_of_trained
from ...source.registry import detector
from ...source.values import choices
from ...trace import Run
from ...trace.events import Scaler, Step
from ..base import Rule
from ._low import low_groups


class Fp16WithoutScaler(Rule):
    """With `param_dtype=float16` the loss is scaled before backward.

    Why: gradients are computed in float16 before FSDP casts them for reduction. Below 6e-8 they are zero, below 6e-5
    they lose digits, and gradients of a trained network are smaller than that. bfloat16 has the range of float32 and
    needs no scaler.
    Wrong:
        policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
    Right:
        scaler = torch.amp.GradScaler(device="cpu")  # one for the whole training, on the device of the loss
        loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    Fix: Use `param_dtype=torch.bfloat16`; or `torch.amp.GradScaler` (it works on DTensor gradients, and agrees over
    the ranks whether to skip a step), with `scaler.unscale_(optimizer)` before any clipping.
    Source: pytorch/torchtitan#1735, PR#629; pytorch PR#132816; verl-project/verl PR#6150.
    """

    wants = "models"

    def applies(self, evidence: Evidence) -> str:
        return "" if low_groups(evidence.trained, "float16") else "no group computes in float16"

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        half = low_groups(run, "float16")
        scaler = run.traces[0].first(Scaler)
        if scaler is not None:
            return self.passed(f"the loss goes through {scaler.cls}")
        if not any(run.micros(1)):
            return self.unknown("no backward was seen")
        if (factor := _loss_scale(run)) is not None:
            return self.passed(f"the script scales the loss itself, by {factor:g}")
        return self.failed(
            f"param_dtype is float16 in {count(len(half), 'call')} of fully_shard, and no loss was scaled: gradients below 6e-8 are zero",
            half[0].at_line,
        )


def _loss_scale(run: Run) -> float | None:
    """By what the script divides all gradients between backward and the first step, if it is a power of two from 8 up."""
    before, after = run.whole(Step, "grads", 1), run.whole(Step, "grads_at_step", 1)
    factors = [
        math.sqrt(a[0] / b[0])
        for name, a in before.items()
        if a is not None and (b := after.get(name)) is not None and a[0] > 0.0 and b[0] > 0.0
    ]
    if not factors or min(factors) < 8.0:
        return None
    power = 2.0 ** round(math.log2(factors[0]))
    return power if all(abs(f / power - 1.0) < 1e-4 for f in factors) else None


_SCALES = ("loss_scale", "scale_loss", "scale")


@detector("fp16-without-scaler")
def fp16_without_scaler(flow: Flow) -> Iterator[Hit]:
    if not flow.certain or not trains(flow):
        return
    used = policies_of_trained(flow)
    for event in flow.ops(POLICY):
        low = is_dtype(event.arg(0, "param_dtype"), LOW_DTYPES[1:]) and any(event.result in choices(v) for v in used)
        if low and not any("scaler" in word.lower() or word in _SCALES for word in identifiers(flow)):
            yield flow.hit(
                "fp16-without-scaler", f"{text(event.node)}, and no GradScaler: small gradients become 0", event
            )
