import re

from ...analysis.presence import unsharded
from ...analysis.root_cause import root_cause
from ...analysis.wording import some
from ...evidence import Evidence
from ...finding import Finding
from ...trace.events import InplaceView, Step
from ..base import Rule


class InplaceOpOnOutputView(Rule):
    """The output of a wrapped module is not changed in place if it is a view.

    Why: FSDP gathers weights for backward in a hook on the output of the wrapped module. An in-place operation on a
    view (what `nn.Linear` gives for 3-D inputs, or a squeeze) makes autograd rewrite the node, and the hook is gone:
    backward meets freed weights (`setStorage ... out of bounds for storage of size 0`), or a reduction is left out.
    Wrong:
        logits = model(batch)  # the head gives a view of what it has computed in two dims
        logits *= 0.5
    Right:
        logits = model(batch)
        logits = logits * 0.5
    Fix: Use the out-of-place operation on the output of a wrapped module (`x = x + y`), or `.clone()` it first.
    Source: pytorch#181832, PR#181850; the UserWarning of torch 2.13 (`returned a view tensor`).
    """

    wants = "models"
    stops = re.compile(r"setStorage|out of bounds for storage of size 0")

    def applies(self, evidence: Evidence) -> str:
        return unsharded(evidence.trained)

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        changed = next((r for t in run.traces for r in t.of(InplaceView)), None)
        if changed is None:
            if run.steps() == 0:
                return self.unknown("no optimizer step was seen")
            return self.passed("no view that a wrapped module returned was changed in place before backward")
        told = f"the output of a wrapped {changed.module} is a view, and it is changed in place before backward"
        stopped = "" if run.completed else root_cause(run).error
        if self.stops.search(stopped):
            return self.failed(f"{told}: the run stopped: {stopped[:160]}", changed.at_line)
        unsynced = next((r for t in run.traces for r in t.of(Step) if r.unsynced), None)
        if unsynced is not None:
            names = some(unsynced.unsynced)
            return self.failed(
                f"{told}: at step {unsynced.step} the gradients of {names} are not reduced", changed.at_line
            )
        return self.passed(f"{told}; every gradient was reduced all the same")
