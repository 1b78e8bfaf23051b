import re
from collections import Counter

from ...analysis.presence import begins_elsewhere
from ...analysis.state import KEPT, LEAST, apart, assigned_anew, decisive, evolving, restorable, whole
from ...trace.events import Held
from ..base import Evidence, Finding, Rule, Run, some
from ..checkpoint._resumed import load_line, saved_at

LATER = 3  # steps after the checkpoint
MOST = 4  # holders that are named one by one
SAME = 1e-6  # relative; a restored value has the same bits, a forward on it may round differently


class StateRestored(Rule):
    """A resumed run has all the state that the uninterrupted run has at the same step.

    Why: what a loop carries from step to step beside model and optimizer is lost unless it is saved: a moving average
    of the weights, running statistics, the best score so far, a patience counter, a schedule. If it feeds no loss,
    the trajectory after the resume is the same, and only the exported or the selected model is wrong.
    Wrong:
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)  # and the average?
    Right:
        dcp.save({"model": model_state, "optimizer": optimizer_state, "ema": ema}, checkpoint_id=path)
    Fix: Save what is named here in the checkpoint and load it before training continues.
    Source: law L6: at the first forward of each step the probe records buffers, modules, schedulers, scalers, tensors
    and numbers that the frames of the training loop reach. Numbers count only if a condition that does more than log
    depends on them, and tensors of one element likewise.
    """

    needs = frozenset({"train", "resume"})

    def judge(self, evidence: Evidence) -> Finding:
        train, resume, after = evidence.trained, evidence.resume, evidence.saved_after()
        if resume is None:
            return self.unknown(evidence.missing.get("resume", "the script was not resumed"))
        if after is None:
            return self.unknown("the train run saved nothing before its last step")
        if reason := begins_elsewhere(train, resume):
            return self.unknown(reason)
        lost, compared = differing(evidence, train, resume, after + 1)
        parted = [] if lost else parting(train, resume, after)
        if not whole(resume, 1) or not whole(train, after + 1):
            return self.unknown(f"no state was recorded at step {after + 1} of both the train run and the resumed run")
        if not compared:
            return self.not_applicable(
                "nothing that the loop carries beside model and optimizer changes from step to step"
            )
        if lost:
            return self.failed(
                f"step {after + 1} starts after the resume with other values than without it: {some(lost, 4)}{saved_at(evidence)}",
                load_line(evidence),
            )
        if parted:
            return self.failed(
                f"what the resumed run makes of its state is not what the uninterrupted run makes of it: {some(parted, 4)}"
                f"{saved_at(evidence)}",
                load_line(evidence),
            )
        return self.passed(f"{compared} values that change from step to step are the same after the resume")


def differing(evidence: Evidence, train: Run, resume: Run, step: int) -> tuple[list[str], int]:
    """(what differs, in words, by the variable that holds it; how many values were compared) where a resumed run begins."""
    mine, theirs = whole(resume, 1), whole(train, step)
    paths = evolving(train)
    deciding = decisive(evidence.sources, paths)
    same_samples = resume.global_batch(1) == train.global_batch(step)  # else tensors of the loop may be those samples
    anew = assigned_anew(evidence.sources)
    chosen = [
        p
        for p in sorted(paths & theirs.keys())
        if tuple(p.rsplit(".", 1)) not in anew
        and restorable(p, theirs[p], deciding)
        and (same_samples or theirs[p].holder in KEPT or theirs[p].sketch is None)
    ]
    weights = {path: (mine.get(path), theirs[path]) for path in chosen}
    lost = {path: (now, then) for path, (now, then) in weights.items() if now is not None and apart(now, then) > SAME}
    later, without = whole(resume, 2), whole(train, step + 1)
    for path, (_, then) in list(lost.items()):  # what the loop sets in each step, before the optimizer reads it
        if (
            then.holder == "optimizer"
            and path in later
            and path in without
            and apart(later[path], without[path]) <= SAME
        ):
            del lost[path]
    return _named(lost), sum(now is not None for now, _ in weights.values())


def parting(train: Run, resume: Run, after: int) -> list[str]:
    """The state, in words, that was restored and is another one steps later, while the weights are still the same ones."""
    first = whole(resume, 1)
    paths = {
        p for p in evolving(train) & evolving(resume) & first.keys() if first[p].sketch and first[p].numel >= LEAST
    }
    for step in range(1, LATER):
        mine, theirs = whole(resume, step + 1), whole(train, after + step + 1)
        if not (
            mine and theirs and _same_step(train, resume, after, step) and _same_step(train, resume, after, step + 1)
        ):
            break
        apart_now = {p: (mine[p], theirs[p]) for p in sorted(paths & mine.keys() & theirs.keys())}
        apart_now = {p: pair for p, pair in apart_now.items() if not pair[1].live and apart(*pair) > SAME}
        if apart_now:
            around = {above for path in apart_now for above in _above(path)}
            numbers = {p: (mine[p], theirs[p]) for p in mine.keys() & theirs.keys() if _holder(p) in around}
            beside = {
                p: (now, then)
                for p, (now, then) in numbers.items()
                if now.value is not None and now.value != then.value
            }
            return _named(apart_now | beside)
    return []


def _same_step(train: Run, resume: Run, after: int, step: int) -> bool:
    """Whether a step of the resumed run has the samples of the uninterrupted run's and makes the same weights."""
    pairs = [
        (a.stepped[after + step - 1 :], b.stepped[step - 1 :]) for a, b in zip(train.traces, resume.traces, strict=True)
    ]
    return resume.global_batch(step) == train.global_batch(after + step) and all(
        a and b and a[0].weights == b[0].weights for a, b in pairs
    )


def _above(path: str) -> list[str]:
    """All that holds a value, from the inside: `main.ema['head.weight']` -> `main.ema`, `main`."""
    found = [path]
    while _holder(found[-1]) != found[-1]:
        found.append(_holder(found[-1]))
    return [one for one in found[1:] if "." in one]


def _named(lost: dict[str, tuple[Held, Held]]) -> list[str]:
    """What is lost, in words: numbers with both values, tensors by the variable or module that holds them."""
    numbers = [
        f"`{path}` = {now.value:.6g} instead of {then.value:.6g}"
        for path, (now, then) in lost.items()
        if now.value is not None and then.value is not None
    ]
    holders = Counter(path for path, (now, _) in lost.items() if now.value is None)
    while len(holders) > MOST and any(_holder(path) != path for path in holders):
        shorter: Counter[str] = Counter()
        for path, number in holders.items():
            shorter[_holder(path)] += number
        holders = shorter
    return numbers + [f"`{path}`" + (f" ({number} tensors)" if number > 1 else "") for path, number in holders.items()]


def _holder(path: str) -> str:
    """What holds a value: `main.ema['head.weight']` -> `main.ema`."""
    return re.sub(r"(\[[^\[]*\]|\.\w+)$", "", path)
