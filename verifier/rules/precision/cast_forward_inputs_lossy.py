from ...analysis.wording import count
from ...evidence import Evidence
from ...finding import Finding
from ...trace.events import LossyCast
from ..base import Rule
from ._low import NO_LOW, low_groups


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
    Fix: Pass such inputs as integers and convert inside the module, or shard with
    `MixedPrecisionPolicy(..., cast_forward_inputs=False)` and cast the activations yourself.
    Source: pytorch/torchtitan PR#2881; huggingface/transformers#29496; deepspeedai/DeepSpeed PR#8066; the docstring of
    `MixedPrecisionPolicy`.
    """

    wants = "models"

    def applies(self, evidence: Evidence) -> str:
        return "" if low_groups(evidence.trained) else NO_LOW

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        lost = next((r for t in run.traces if (r := t.first(LossyCast)) is not None), None)
        if lost is None:
            low = len(low_groups(run))
            return self.passed(
                f"no whole number among the inputs of {count(low, 'low-precision group')} changed by the cast"
            )
        return self.failed(
            f"FSDP casts an input of {lost.cls} (shape {tuple(lost.shape)}, whole numbers) to {lost.dtype}: "
            f"{lost.was:g} becomes {lost.now:g}, and {lost.changed} elements in all change",
            lost.at_line,
        )
