from ...analysis.root_cause import RootCause
from ...trace import Run
from ...trace.events import Model, Place
from ..base import RaisedRule
from ..raised import last_shard


class InferenceModeBeforeTraining(RaisedRule):
    """Evaluation of a model that goes on to train runs under `torch.no_grad`, not under `torch.inference_mode`.

    Why: the first forward allocates the buffers of the gathered weights. Under inference mode they become inference
    tensors, which no later training forward may write.
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
    Fix: Use `torch.no_grad()` in the place of `torch.inference_mode()`.
    Source: the message of torch 2.13.0; the documentation of `torch.inference_mode`.
    """

    named_by = ("inference_mode",)
    pattern = r"Inplace update to inference tensor outside InferenceMode|Inference tensors do not track version counter"

    def fits(self, run: Run, cause: RootCause) -> bool:
        return last_shard(run) is not None

    def place(self, run: Run, cause: RootCause) -> Place | None:
        """The first forward, which was the one under inference mode."""
        lines = [r.at_line for r in run.places(Model) if r.at_line]
        return lines[0] if lines else cause.location
