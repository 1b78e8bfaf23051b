from collections.abc import Iterator

from ...analysis.wording import count
from ...evidence import Evidence
from ...finding import Finding, Hit
from ...source.events import Flow
from ...source.looks import LOW_DTYPES, is_const, is_dtype, text, trains
from ...source.looks_precision import POLICY, policies_of_trained
from ...source.registry import detector
from ...source.values import choices
from ..base import Rule
from ._low import NO_LOW, low_groups


class ReduceDtypeFollowsParamDtype(Rule):
    """With a low-precision `param_dtype`, `reduce_dtype` is given.

    Why: `reduce_dtype=None` means the dtype of the unsharded gradient, so with `param_dtype=bfloat16` gradients are
    summed over ranks in bfloat16. The sharded `.grad` still shows float32, and the error grows with the world size.
    Wrong:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        shard(Decoder(), mp_policy=policy)
    Right:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard(Decoder(), mp_policy=policy)
    Fix: Pass `reduce_dtype=torch.float32` to MixedPrecisionPolicy (or the low dtype, if that is what you want, in
    writing).
    Source: the docstring of `MixedPrecisionPolicy`; pytorch/torchtitan `config` allows float32 only;
    meta-pytorch/torchtune#2254.
    """

    wants = "run"

    def applies(self, evidence: Evidence) -> str:
        return NO_LOW if evidence.trained.models and not low_groups(evidence.trained) else ""

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        low = low_groups(run)
        bad = [record for record in low if record.reduce_dtype is None]
        if not bad and not run.models:
            return self.unknown("no forward of a model was seen")
        if not bad:
            kinds = {f"param_dtype {r.param_dtype}, reduce_dtype {r.reduce_dtype}" for r in low}
            return self.passed("; ".join(sorted(kinds)))
        return self.failed(
            f"param_dtype is {bad[0].param_dtype} and reduce_dtype is not given in {len(bad)} of {count(len(low), 'call')}: "
            f"gradients are reduced in {bad[0].param_dtype}",
            bad[0].at_line,
        )


@detector("reduce-dtype-follows-param-dtype")
def reduce_dtype_follows(flow: Flow) -> Iterator[Hit]:
    if not trains(flow):
        return
    used = policies_of_trained(flow)
    for event in flow.ops(POLICY):
        low = is_dtype(event.arg(0, "param_dtype"), LOW_DTYPES)
        reduce = event.arg(1, "reduce_dtype")
        unset = reduce is None or is_const(reduce, None)
        if low and unset and not event.open and any(event.result in choices(v) for v in used):
            told = f"{text(event.node)} has no reduce_dtype: gradients are summed over the ranks in 16 bits"
            yield flow.hit("reduce-dtype-follows-param-dtype", told, event)
