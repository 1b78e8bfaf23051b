import re

from ...analysis.root_cause import root_cause
from ...trace.events import InplaceView, Step
from ..base import Evidence, Finding, some
from ._base import ShardedModelRule


class InplaceOpOnOutputView(ShardedModelRule):
    """The output of a wrapped module is not changed in place if it is a view.

    Why: FSDP gathers weights for backward in a hook on the output of the wrapped module. An
    in-place operation on a view (the output of `nn.Linear` for 3-D inputs, or of a squeeze) makes
    autograd rewrite the node and drop the hook: backward uses freed weights (`setStorage ... out of
    bounds for storage of size 0`), or a reduction is skipped.
    Wrong:
        logits = model(batch)  # the head returns a view of its 2-D result
        logits *= 0.5
    Right:
        logits = model(batch)
        logits = logits * 0.5
    Fix: Use the out-of-place operation on the output of a wrapped module (`x = x + y`), or
    `.clone()` it first.
    Source: pytorch#181832, PR#181850; the UserWarning of torch 2.13 (`returned a view tensor`).
    """

    explains = ("run-completes",)
    stops = re.compile(r"setStorage|out of bounds for storage of size 0")

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        changed = next(iter(run.all(InplaceView)), None)
        if changed is None:
            none = "no output view of a wrapped module was changed in place before backward"
            return self.passed_with_steps(run, none)
        what = (
            f"the output of a wrapped {changed.module} is a view that is changed in place before"
            " backward"
        )
        stopped = "" if run.completed else root_cause(run).error
        if self.stops.search(stopped):
            return self.failed(f"{what}; the run stopped with {stopped[:160]}", changed.at_line)
        unsynced = next((r for r in run.all(Step) if r.unsynced), None)
        # An in-place change of a view is harmless where every gradient was reduced nevertheless.
        if unsynced is None:
            return self.passed(f"{what}; every gradient was reduced nevertheless")
        names = some(unsynced.unsynced)
        return self.failed(
            f"{what}; at step {unsynced.step} the gradients of {names} are not reduced",
            changed.at_line,
        )
