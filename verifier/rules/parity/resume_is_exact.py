import re
from pathlib import PurePath

from ...analysis.applicability import begins_elsewhere
from ...analysis.checkpoints import saved_paths
from ...analysis.root_cause import NO_FILE, RootCause, root_cause
from ...analysis.state_after_resume import beginning
from ...analysis.unusual_parallelism import begun_before_save, resumable
from ...analysis.why_not_run import looks_above
from ...trace.events import LoaderStarted, Step, Stepped
from ..base import Evidence, Finding, Rule, Run, count, some
from ..checkpoint._resumed import RAISED, load_line, saved_at

OTHER = (
    "Save what is named here, of each rank its own, and load it; if no step reads it, look at the"
    " RNG state of every rank."
)

_MISSING_KEYS = re.compile(r"Missing key\(s\) in state_dict: (?P<keys>.*)")
WITHOUT_FROZEN = (
    "Load with `strict=False` what is saved without the frozen parameters, or save these too."
)


class ResumeIsExact(Rule):
    """At the same world size a resumed run continues bitwise equal.

    Why: whatever a checkpoint lacks (RNG state, an average of the weights, a loss scale) shows in
    the trajectory.
    Wrong:
        state = {"model": model_state, "optimizer": optimizer_state}  # dropout: other masks
        dcp.save(state, checkpoint_id=path)
    Right:
        states = [None] * dist.get_world_size()
        dist.all_gather_object(states, torch.get_rng_state())
        state = {"model": model_state, "optimizer": optimizer_state, "rng": states}
        dcp.save(state, checkpoint_id=path)
    Fix: Save and restore the RNG state of every rank, and everything else that a step reads.
    Source: pytorch/torchtitan scripts/checkpoint_compat_test.py; measured: next five losses bitwise
    equal on gloo.
    """

    explains = ("reshard-keeps-trajectory",)
    names_a_cause = False
    needs = frozenset({"train", "resume"})

    def judge(self, evidence: Evidence) -> Finding:
        train, resume, after = evidence.trained, evidence.resume, evidence.resumed_after()
        if resume is None:
            return self.unknown(evidence.missing.get("resume", "the script was not resumed"))
        if not resume.completed:
            cause = root_cause(resume)
            # A resume that finds no file because --resume-args names another folder than the save
            # is the user's command, not the script's fault.
            if above := looks_above(cause.text, evidence):
                return self.unknown(above)
            other, fix = _another_path(train, cause), RAISED
            if other:
                fix = "Make the path that is loaded from what the save made it from."
            elif frozen := _frozen_and_missing(train, cause):
                other, fix = f"{cause.text}; {frozen}", WITHOUT_FROZEN
            return self.failed(
                f"the resume run failed: {other or cause.text}", cause.location, fix=fix
            )
        if after is None:
            return self.unknown("the train run saved nothing before its last step")
        # A save after some of a step's backward passes holds its gradients too: the resumed run
        # makes the rest of that step, so the weights after it are compared, not its losses (exam
        # round 6 t_15_token_budget).
        if begun_before_save(train, after) and resume.steps() > 0:
            return self._of_a_begun_step(evidence, train, resume, after)
        # An own L-BFGS ends its step with a backward before the save, so its next step has one
        # backward less: records are shifted before they are compared (exam round 10
        # kd_15_seismic_lbfgs_inversion).
        train = resumable(train, after)
        # Two peers that take turns: the resumed run begins with the other's step, so its step 1 has
        # no equal in the train run. Inconclusive, with the advice to save after a whole round (exam
        # round 2 e_15_mutual_learning).
        if reason := begins_elsewhere(train, resume, after):
            return self.unknown(reason)
        steps = min(resume.steps(), train.steps() - after)
        if steps < 1:
            return self.unknown("the resume run made no step that the train run made too")
        for k in range(1, steps + 1):
            if apart := _apart(train, resume, after, k):
                return self._differs(evidence, train, apart, k)
        return self.passed(
            f"losses and weights of {count(steps, 'step')} after step {after} are bitwise equal"
        )

    def _differs(self, evidence: Evidence, train: Run, apart: str, k: int) -> Finding:
        """Step k after the resume is another one."""
        resume, after = evidence.resume, evidence.resumed_after()
        assert resume is not None and after is not None
        what = apart
        if k > 1 and (others := _other_samples(train, resume, after, k)):
            what = f"{others}: {what}"
        if frozen := _frozen(train.at_step(Step, after + 1), resume.at_step(Step, 1)):
            what = f"{what}: in step {after + 1} {frozen}"
        what = f"{what} (allowed: no difference)"
        more: dict[str, str] = {}
        if other := beginning(evidence, train, resume, after + 1).other:
            what = f"{what}; step {after + 1} begins there with {some(other, 3)}"
            more = {"fix": OTHER}
        return self.failed(f"{what}{saved_at(evidence)}", load_line(evidence), **more)

    def _of_a_begun_step(self, evidence: Evidence, train: Run, resume: Run, after: int) -> Finding:
        """A checkpoint from the middle of a step holds its gradients too: the weights after that
        step are the same ones.
        """
        if _same_weights(train, resume, after + 1, 1):
            return self.passed(
                f"saved in the middle of step {after + 1}, after which the weights are bitwise"
                " equal"
            )
        early, whole = begun_before_save(train, after) or (0, 0)
        what = (
            f"the save comes after {early} of the {whole} backward passes of step {after + 1}, and"
            " the weights after that step"
        )
        fix = (
            "Save at the end of a step, or save the gradients that are accumulated until then, too."
        )
        return self.failed(
            f"{what} are others after the resume{saved_at(evidence)}", load_line(evidence), fix=fix
        )


def _apart(train: Run, resume: Run, after: int, k: int) -> str:
    """What differs in step k after the resume, in words; "" if it is the same step."""
    number = after + k
    theirs = [[m.loss for m in micros] for micros in train.micros(number)]
    mine = [[m.loss for m in micros] for micros in resume.micros(k)]
    if theirs == mine and _same_weights(train, resume, number, k):
        return ""
    a, b = train.objective(number), resume.objective(k)
    if a != b:
        return f"the loss of step {number} is {b!r} after the resume, {a!r} without"
    return f"the weights after step {number} differ from those without the resume"


def _same_weights(train: Run, resume: Run, number: int, k: int) -> bool:
    """Whether the weights after step k of the resumed run are those after this step."""
    pairs = zip(train.at_step(Stepped, number), resume.at_step(Stepped, k), strict=True)
    return all(
        a.weights[name] == b.weights[name]
        for a, b in pairs
        for name in a.weights.keys() & b.weights.keys()
    )


def _other_samples(train: Run, resume: Run, after: int, k: int) -> str:
    """That only step k after the resume trains on other samples, in words; "" if it trains on the
    same ones.
    """
    if train.global_batch(after + k) == resume.global_batch(k):
        return ""
    begins = any(
        r.step == number
        for run, number in ((train, after + k), (resume, k))
        for r in run.places(LoaderStarted)
    )
    there = ", in which an epoch begins," if begins else ""
    return (
        f"{count(k - 1, 'step')} after the resume agree, and step {after + k}{there} trains on"
        " other samples"
    )


def _frozen(theirs: list[Step], mine: list[Step]) -> str:
    """Which parameters have gradients on rank 0 in one of two steps alone, in words; "" if there
    are none.
    """
    if not theirs or not mine:
        return ""
    without, after = (
        {n for n, grad in record.grads.items() if grad is not None}
        for record in (theirs[0], mine[0])
    )
    for names, where in (
        (without - after, "without the resume and not after it"),
        (after - without, "after the resume alone"),
    ):
        if names and without and after:
            return (
                f"{count(len(names), 'parameter')} ({some(sorted(names))})"
                f" {'has' if len(names) == 1 else 'have'} gradients {where}"
            )
    return ""


def _frozen_and_missing(train: Run, cause: RootCause) -> str:
    """That the keys which a load misses are those of frozen parameters, in words; "" if they are
    not (InternLM/xtuner: a save that ignores frozen parameters, a strict load).
    """
    message = _MISSING_KEYS.search(cause.error)
    keys = re.findall(r'"([^"]+)"', message["keys"]) if message is not None else []
    frozen = [
        name
        for name, entries in train.parameters.items()
        if not entries[0].trainable and any(_same_name(name, key) for key in keys)
    ]
    if not keys or len(frozen) < len(keys):
        return ""
    which = "is that of a frozen parameter" if len(keys) == 1 else "are those of frozen parameters"
    return f"the missing {'key' if len(keys) == 1 else 'keys'} {which}, which the save left out"


def _same_name(name: str, key: str) -> bool:
    """Whether two names are those of one parameter, seen from modules within one another."""
    long, short = (name, key) if len(name) > len(key) else (key, name)
    return long == short or long.endswith(f".{short}")


def _another_path(train: Run, cause: RootCause) -> str:
    """What a resume looked for, and what was saved beside it, where a file is missing (accelerate:
    the folder of a part was chosen by a name that stood elsewhere in the path); "" for others.
    """
    missing = NO_FILE.search(cause.error)
    if missing is None:
        return ""
    looked_for = PurePath(missing["path"])
    near = [path for path in saved_paths(train) if looked_for.parent in PurePath(path).parents]
    if not near:
        return ""
    return f"rank {cause.rank} looks for `{looked_for}`, and the saves wrote {some(near, 2)}"
