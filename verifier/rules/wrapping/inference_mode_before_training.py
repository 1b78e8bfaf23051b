from ...trace.events import Model, Place
from ..base import RaisedRule, RootCause, Run
from ..policies import AfterSharding


class InferenceModeBeforeTraining(RaisedRule):
    """Evaluation before training runs under `torch.no_grad`, not under `torch.inference_mode`.

    Why: the first forward allocates the buffers of the gathered weights. Under inference mode they
    become inference tensors, which a later training forward cannot write to.
    Wrong:
        shard(model)
        with torch.inference_mode():
            model(batch)
        model(batch)  # raises RuntimeError
    Right:
        shard(model)
        with torch.no_grad():
            model(batch)
        model(batch)
    Fix: Replace `torch.inference_mode()` by `torch.no_grad()`.
    Source: the message of torch 2.13.0; the documentation of `torch.inference_mode`.
    """

    named_by = ("inference_mode",)
    pattern = (
        r"Inplace update to inference tensor outside InferenceMode|Inference tensors do not track"
        r" version counter"
    )
    policies = (AfterSharding(),)

    def place(self, run: Run, cause: RootCause) -> Place | None:
        return run.line_of(Model) or cause.location  # the one under inference mode
