import math

from ...source.flow_queries import LOW_DTYPES, identifiers, text, trains
from ...trace.events import Scaler, Step
from ..base import Evidence, Finding, Flow, Hits, Run, count
from ._low import LowRule, low_groups, low_policies_of_trained


class Fp16WithoutScaler(LowRule):
    """With `param_dtype=float16` the loss is scaled before backward.

    Why: gradients are computed in float16 before FSDP casts them for reduction. Below 6e-8 they are
    zero, below 6e-5 they lose digits, and gradients get that small. bfloat16 has the range of
    float32 and needs no scaler.
    Wrong:
        policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
        loss_of(model, batch).backward()
        optimizer.step()
    Right:
        # one for the whole training, on the device of the loss
        scaler = torch.amp.GradScaler(device="cpu")
        scaler.scale(loss_of(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()
    Fix: Use `param_dtype=torch.bfloat16`, or `torch.amp.GradScaler` with
    `scaler.unscale_(optimizer)` before clipping.
    Source: pytorch/torchtitan#1735, PR#629; pytorch PR#132816; verl-project/verl PR#6150.
    """

    wants = "models"
    dtypes = ("float16",)

    def judge(self, evidence: Evidence) -> Finding:
        run, half = evidence.trained, low_groups(evidence.trained, *self.dtypes)
        scaler = run.traces[0].first(Scaler)
        if scaler is not None:
            return self.passed(f"the loss is scaled by {scaler.cls}")
        if not any(run.micros(1)):
            return self.unknown("no backward was seen")
        if (factor := _loss_scale(run)) is not None:
            return self.passed(f"the script scales the loss itself, by {factor:g}")
        calls = f"param_dtype is float16 in {count(len(half), 'call')} of fully_shard"
        return self.failed(
            f"{calls} and the loss is not scaled: gradients below 6e-8 are zero", half[0].at_line
        )

    def detect(self, flow: Flow) -> Hits:
        if not flow.certain or not trains(flow):
            return
        for event in low_policies_of_trained(flow, LOW_DTYPES[1:]):
            if not any(
                # Names by which scripts scale the loss without a GradScaler (zoo/fp16_scaler.py).
                "scaler" in w.lower() or w in ("loss_scale", "scale_loss", "scale")
                for w in identifiers(flow)
            ):
                yield f"{text(event.node)} without a GradScaler: small gradients become 0", event


def _loss_scale(run: Run) -> float | None:
    """The divisor of all gradients between backward and the first step, if it is a power of two
    from 8 up.
    """
    before, after = run.whole(Step, "grads", 1), run.whole(Step, "grads_at_step", 1)
    pairs = [(a[0], b[0]) for name, a in before.items() if a and (b := after.get(name))]
    factors = [math.sqrt(a / b) for a, b in pairs if a > 0.0 and b > 0.0]
    # A static loss scale is a power of two far above 1; divisions by micro-batches or ranks (2, 4)
    # are not taken for one.
    if not factors or min(factors) < 8.0:
        return None
    power = 2.0 ** round(math.log2(factors[0]))
    # All gradients are divided by the same power of two, which float arithmetic does exactly; fp16
    # gradients leave up to 1e-4 in the norms.
    return power if all(abs(f / power - 1.0) < 1e-4 for f in factors) else None
