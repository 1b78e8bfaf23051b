"""Rules on dtypes."""

from __future__ import annotations

import math

from ..evidence import Evidence
from ..finding import Finding
from ..trace import Run
from .base import Rule, count, some

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


class CastForwardInputsLossy(Rule):
    """No position, time step or count among a module's inputs changes value when FSDP casts inputs to `param_dtype`.

    Why: `cast_forward_inputs=True`, the default, casts every floating-point tensor among the arguments of every wrapped
    module. bfloat16 holds whole numbers up to 256 only (float16 up to 2048): a time step of 257 arrives as 256, 1001
    as 1000. Nothing is raised; quality is lost at long context or at late time steps.
    Wrong:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        time = torch.randint(0, 1000, (batch_size,)).float()  # an argument of a wrapped module: 257 becomes 256
        fully_shard(denoiser, mp_policy=policy)
        denoiser(noisy, time)
    Right:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        time = torch.randint(0, 1000, (batch_size,))  # whole numbers stay whole: only floats are cast
        fully_shard(denoiser, mp_policy=policy)
        denoiser(noisy, time)
    Mend: Pass such inputs as integers and convert inside the module, or shard with
    `MixedPrecisionPolicy(..., cast_forward_inputs=False)` and cast the activations yourself.
    Source: pytorch/torchtitan PR#2881; huggingface/transformers#29496; deepspeedai/DeepSpeed PR#8066; the docstring of
    `MixedPrecisionPolicy`.
    Torch: run on 2.13.0.
    """

    name = "cast-forward-inputs-lossy"
    family = "precision"

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        shards = run.traces[0].of("shard") if run is not None and run.traces else []
        if run is None or not shards:
            return self.unknown("no call of fully_shard was seen")
        lost = next((r for t in run.traces if (r := t.first("lossy_cast")) is not None), None)
        if lost is None:
            low = sum(r["param_dtype"] in LOW for r in shards)
            return self.passed(
                f"no whole number among the inputs of {count(low, 'low-precision group')} changed by the cast"
                if low
                else "no group computes in low precision, so no input is cast"
            )
        return self.failed(
            f"FSDP casts an input of {lost['cls']} (shape {tuple(lost['shape'])}, whole numbers) to {lost['dtype']}: "
            f"{lost['was']:g} becomes {lost['now']:g}, and {lost['changed']} elements in all change",
            lost["at_line"],
        )


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
    Mend: Use `param_dtype=torch.bfloat16`; or `torch.amp.GradScaler` (it works on DTensor gradients, and agrees over
    the ranks whether to skip a step), with `scaler.unscale_(optimizer)` before any clipping.
    Source: pytorch/torchtitan#1735, PR#629; pytorch PR#132816; verl-project/verl PR#6150.
    Torch: run on 2.13.0.
    """

    name = "fp16-without-scaler"
    family = "precision"

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        shards = run.traces[0].of("shard") if run is not None and run.traces else []
        if run is None or not shards:
            return self.unknown("no call of fully_shard was seen")
        half = [r for r in shards if r["param_dtype"] == "float16"]
        if not half:
            return self.passed("no group computes in float16")
        scaler = run.traces[0].first("scaler")
        if scaler is not None:
            return self.passed(f"the loss goes through {scaler['cls']}")
        if not any(run.micros(1)):
            return self.unknown("no backward was seen")
        if (factor := _loss_scale(run)) is not None:
            return self.passed(f"the script scales the loss itself, by {factor:g}")
        return self.failed(
            f"param_dtype is float16 in {len(half)} of {len(shards)} calls, and no loss was scaled: gradients below 6e-8 are zero",
            half[0]["at_line"],
        )


def low_precision(run: Run) -> str | None:
    """The low dtype in which a run computes, by FSDP's policy or by autocast; None if there is none."""
    policy = next((r["param_dtype"] for r in run.places("shard") if r["param_dtype"] in LOW), None)
    autocast = next((r["dtype"] for r in run.places("autocast") if r["dtype"] in LOW), None)
    return policy or autocast


def _loss_scale(run: Run) -> float | None:
    """By what the script divides all gradients between backward and the first step, if it is a power of two from 8 up."""
    before, after = run.whole("step", "grads", 1), run.whole("step", "grads_at_step", 1)
    factors = [
        math.sqrt(a[0] / b[0])
        for name, a in before.items()
        if a is not None and (b := after.get(name)) is not None and a[0] > 0.0 and b[0] > 0.0
    ]
    if not factors or min(factors) < 8.0:
        return None
    power = 2.0 ** round(math.log2(factors[0]))
    return power if all(abs(f / power - 1.0) < 1e-4 for f in factors) else None


RULES = (Bf16MasterWeights, CastForwardInputsLossy, Fp16WithoutScaler, ReduceDtypeFollowsParamDtype)
