from ...analysis.root_cause import root_cause
from ...analysis.wording import count
from ...evidence import Evidence
from ...finding import Finding
from ...trace.events import Stepped
from ..base import Rule
from ..checkpoint._resumed import load_line, saved_at


class ResumeIsExact(Rule):
    """At the same world size a resumed run goes on bit for bit.

    Why: whatever is missing from a checkpoint (random state, an average of weights, a loss scale) shows in the
    trajectory, if not in any single piece of state.
    Wrong:
        state = {"model": model_state, "optimizer": optimizer_state}  # the model has dropout: other masks after the resume
        dcp.save(state, checkpoint_id=path)
    Right:
        states = [None] * dist.get_world_size()
        dist.all_gather_object(states, torch.get_rng_state())
        state = {"model": model_state, "optimizer": optimizer_state, "rng": states}
        dcp.save(state, checkpoint_id=path)
    Fix: Save and restore the random state of every rank, and all else that a step reads.
    Source: pytorch/torchtitan scripts/checkpoint_compat_test.py; measured: next five losses bitwise equal on gloo.
    """

    explains = ("reshard-keeps-trajectory",)

    names_a_cause = False
    needs = frozenset({"train", "resume"})

    def judge(self, evidence: Evidence) -> Finding:
        train, resume, after = evidence.trained, evidence.resume, evidence.saved_after()
        if resume is None:
            return self.unknown(evidence.missing.get("resume", "the script was not resumed"))
        if not resume.completed:
            cause = root_cause(resume)
            return self.failed(f"the resumed run did not end well: {cause.text}", cause.location)
        if after is None:
            return self.unknown("the train run saved nothing before its last step")
        steps = min(resume.steps(), train.steps() - after)
        if steps < 1:
            return self.unknown("the resumed run made no step that the train run made too")
        for k in range(1, steps + 1):
            theirs = [[m.loss for m in micros] for micros in train.micros(after + k)]
            mine = [[m.loss for m in micros] for micros in resume.micros(k)]
            pairs = zip(train.at_step(Stepped, after + k), resume.at_step(Stepped, k), strict=True)
            if theirs != mine or any(_other_weights(a.weights, b.weights) for a, b in pairs):
                a, b = train.objective(after + k), resume.objective(k)
                what = f"loss {b!r} instead of {a!r}" if a != b else "other weights after the step"
                told = f"step {after + k} after the resume: {what}{saved_at(evidence)}"
                return self.failed(told, load_line(evidence))
        return self.passed(
            f"{count(steps, 'step')} after the checkpoint of step {after} are bitwise equal: losses and weights"
        )


def _other_weights(a: dict[str, list[float]], b: dict[str, list[float]]) -> bool:
    return any(a[name] != b[name] for name in a.keys() & b.keys())
