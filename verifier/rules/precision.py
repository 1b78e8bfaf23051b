"""Rules on dtypes."""

from __future__ import annotations

from ..evidence import Evidence
from ..finding import Finding
from .base import Rule, some

LOW = ("bfloat16", "float16")


class Bf16MasterWeights(Rule):
    """The weights that the optimizer updates are float32.

    Why: `MixedPrecisionPolicy(param_dtype=bfloat16)` casts for compute and keeps the sharded weights as they were. A
    model that was cast to bfloat16 before `fully_shard` has no float32 weights at all: an update smaller than 1/256
    of a weight rounds to nothing.
    Wrong:
        model = Decoder().to(torch.bfloat16)
        shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    Right:
        model = Decoder()  # float32 master weights
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard(model, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    Mend: Build or load the model in float32 and let `mp_policy` cast; with transformers pass `dtype=torch.float32`.
    Source: huggingface/accelerate#3979; meta-pytorch/torchtune#2254; the docstring of `MixedPrecisionPolicy`.
    Torch: run on 2.13.0.
    """

    name = "bf16-master-weights"
    family = "precision"

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        if run is None or not run.models or run.steps() == 0:
            return self.unknown("no optimizer step was seen")
        record = run.at_step("step", 1)[0]
        held = [name for name in record["held"] if run.parameters[name][0]["trainable"]]
        low = [name for name in held if run.parameters[name][0]["dtype"] in LOW]
        if not low or not record["cls"].startswith("torch.optim."):
            dtypes = sorted({run.parameters[name][0]["dtype"] for name in held}) or ["of no model parameter"]
            return self.passed(f"the optimizer updates weights in {', '.join(dtypes)}")
        changed = sum(r["moved"][n][2] for r in run.at_step("stepped", run.steps()) for n in low if n in r["moved"])
        present = sum(e["local_numel"] for n in low for e in run.parameters[n])
        return self.failed(
            f"{some(low)} are {run.parameters[low[0]][0]['dtype']} in the optimizer; the last step changed "
            f"{changed / max(present, 1):.1%} of their elements",
            evidence.line_of(run, "shard"),
        )


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
    Mend: Pass `reduce_dtype=torch.float32` to MixedPrecisionPolicy (or the low dtype, if that is what you want, in
    writing).
    Source: the docstring of `MixedPrecisionPolicy`; pytorch/torchtitan `config` allows float32 only;
    meta-pytorch/torchtune#2254.
    Torch: run on 2.13.0.
    """

    name = "reduce-dtype-follows-param-dtype"
    family = "precision"

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        shards = run.traces[0].of("shard") if run is not None and run.traces else []
        if not shards:
            return self.unknown("no call of fully_shard was seen")
        bad = [r for r in shards if r["param_dtype"] in LOW and r["reduce_dtype"] is None]
        if not bad:
            kinds = {f"param_dtype {r['param_dtype']}, reduce_dtype {r['reduce_dtype']}" for r in shards}
            return self.passed("; ".join(sorted(kinds)))
        return self.failed(
            f"param_dtype is {bad[0]['param_dtype']} and reduce_dtype is not given in {len(bad)} of {len(shards)} calls: "
            f"gradients are reduced in {bad[0]['param_dtype']}",
            bad[0]["at_line"],
        )


RULES = (Bf16MasterWeights, ReduceDtypeFollowsParamDtype)
