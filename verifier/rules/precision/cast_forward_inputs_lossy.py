from ...trace.events import LossyCast
from ..base import Evidence, Finding, count
from ._low import LowRule, low_groups


class CastForwardInputsLossy(LowRule):
    """FSDP's cast of forward inputs to `param_dtype` does not change positions, time steps or
    counts.

    Why: `cast_forward_inputs=True`, the default, casts every floating-point tensor among the
    arguments of every sharded module. bfloat16 represents whole numbers exactly up to 256 (float16
    up to 2048): a time step of 257 becomes 256, 1001 becomes 1000. Nothing is raised; quality is
    lost at long context or at late time steps.
    Wrong:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(denoiser, mp_policy=policy)
        time = torch.randint(0, 1000, (batch_size,)).float()  # 257 becomes 256
        denoiser(noisy, time)
    Right:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(denoiser, mp_policy=policy)
        time = torch.randint(0, 1000, (batch_size,))  # integers are not cast
        denoiser(noisy, time)
    Fix: Pass such inputs as integers and convert inside the module, or shard with
    `MixedPrecisionPolicy(..., cast_forward_inputs=False)` and cast the activations yourself.
    Source: pytorch/torchtitan PR#2881; huggingface/transformers#29496; deepspeedai/DeepSpeed
    PR#8066.
    """

    wants = "models"

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        lost = next((r for t in run.traces if (r := t.first(LossyCast)) is not None), None)
        if lost is None:
            groups = count(len(low_groups(run)), "low-precision group")
            return self.passed(f"the cast of forward inputs of {groups} changed no whole number")
        cast = (
            f"FSDP casts a forward input of {lost.cls} (shape {tuple(lost.shape)}, whole numbers)"
            f" to {lost.dtype}"
        )
        values = f"{lost.was:g} becomes {lost.now:g}, {count(lost.changed, 'element')} changed"
        return self.failed(f"{cast}: {values}", lost.at_line)
