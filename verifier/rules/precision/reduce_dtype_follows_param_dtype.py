from ...source.looks import is_const, text, trains
from ..base import Evidence, Finding, Flow, Hits, count
from ._low import LowRule, low_groups, low_policies_of_trained


class ReduceDtypeFollowsParamDtype(LowRule):
    """`reduce_dtype` is set where `param_dtype` is low precision.

    Why: `reduce_dtype=None` means the dtype of the unsharded gradient, so with `param_dtype=bfloat16` gradients are
    reduced in bfloat16. The sharded `.grad` is float32 all the same, and the error grows with the world size.
    Wrong:
        shard(Decoder(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    Right:
        shard(Decoder(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    Fix: Pass `reduce_dtype=torch.float32` to MixedPrecisionPolicy (or the low dtype, if that is intended).
    Source: the docstring of `MixedPrecisionPolicy`; torchtitan's `config` (float32 only); meta-pytorch/torchtune#2254.
    """

    wants = "run"

    def judge(self, evidence: Evidence) -> Finding:
        low = low_groups(evidence.trained)
        unset = [record for record in low if record.reduce_dtype is None]
        if unset:
            calls = f"{len(unset)} of {count(len(low), 'call')} of fully_shard set no reduce_dtype"
            return self.failed(f"{calls}: gradients are reduced in {unset[0].param_dtype}", unset[0].at_line)
        if not evidence.trained.models:
            return self.unknown("no forward of a model was seen")
        kinds = {f"param_dtype {r.param_dtype}, reduce_dtype {r.reduce_dtype}" for r in low}
        return self.passed("; ".join(sorted(kinds)))

    def detect(self, flow: Flow) -> Hits:
        if not trains(flow):
            return
        for event in low_policies_of_trained(flow):
            reduce = event.arg(1, "reduce_dtype")
            if not event.open and (reduce is None or is_const(reduce, None)):
                yield f"{text(event.node)} has no reduce_dtype: gradients are reduced in 16 bits", event
