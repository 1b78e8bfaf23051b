from ...analysis.precision import LOW
from ...source.flow_queries import is_const, text, trains
from ...source.installed import installed_torch
from ..base import Evidence, Finding, Flow, Hits, Run, count
from ._low import LowRule, low_groups, low_policies_of_trained


class ReduceDtypeFollowsParamDtype(LowRule):
    """`reduce_dtype` is set where `param_dtype` is low precision.

    Why: before torch 2.15 `reduce_dtype=None` means `param_dtype`, so with bfloat16 gradients are
    reduced in bfloat16. The sharded `.grad` is float32 all the same, and the error grows with the
    world size. From 2.15 on it means the parameter's own.
    Wrong:
        shard(Decoder(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    Right:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard(Decoder(), mp_policy=policy)
    Fix: Pass `reduce_dtype=torch.float32` to MixedPrecisionPolicy (or the low dtype, if that is
    intended).
    Source: the docstring of `MixedPrecisionPolicy`; torchtitan's `config` (float32 only);
    meta-pytorch/torchtune#2254.
    """

    wants = "run"

    def judge(self, evidence: Evidence) -> Finding:
        low = low_groups(evidence.trained)
        unset = [record for record in low if record.reduce_dtype is None]
        # A frozen teacher in bfloat16 gets no gradients: its policy needs no reduce dtype (exam
        # round 10 kb_04_dino_teacher twin).
        if unset and (not evidence.trained.models or _reduces_low(evidence.trained)):
            calls = f"{len(unset)} of {count(len(low), 'call')} of fully_shard set no reduce_dtype"
            return self.failed(
                f"{calls}: gradients are reduced in {unset[0].param_dtype}", unset[0].at_line
            )
        if not evidence.trained.models:
            return self.unknown("no forward of a model was seen")
        kinds = {f"param_dtype {r.param_dtype}, reduce_dtype {r.reduce_dtype}" for r in low}
        frozen = "; those without a reduce_dtype get no gradients" if unset else ""
        return self.passed("; ".join(sorted(kinds)) + frozen)

    def detect(self, flow: Flow) -> Hits:
        if not trains(flow):
            return
        for event in low_policies_of_trained(flow):
            reduce = event.arg(1, "reduce_dtype")
            unset = not event.open and (reduce is None or is_const(reduce, None))
            # From torch 2.15 on reduce_dtype=None reduces in the parameter's own dtype, so nothing
            # is lost (torch 2.15.0).
            if unset and installed_torch() < (2, 15):
                yield (
                    (
                        f"{text(event.node)} has no reduce_dtype: before torch 2.15 gradients are"
                        " then reduced in 16 bits"
                    ),
                    event,
                )


def _reduces_low(run: Run) -> bool:
    """Whether parameters get gradients whose group computes in low precision and says nothing of
    the reduction.
    """
    steps = [record for trace in run.traces for record in trace.steps]
    fed = {name for record in steps for name, grad in record.grads.items() if grad is not None}
    for model in run.models:
        low = {g.module for g in model.groups if g.param_dtype in LOW and g.reduce_dtype is None}
        if any(
            p.group in low and (p.name in fed if steps else p.trainable) for p in model.parameters
        ):
            return True
    return False
