"""What a run that resumed after a crash, or from a damaged checkpoint, started from."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ...analysis.saves import all_saves
from ...trace.events import Saving, Step
from ..base import Evidence, Finding, Rule, Run
from ._resumed import first_steps, load_line, save_line

_Held = dict[int, dict[int, dict[str, list[Any]]]]  # {step: {rank: {tensor: its values}}}


@dataclass(frozen=True)
class Outcome:
    """What a resumed run started from.

    `shares`: {step of a save: tensors that have the values of that save only}.
    """

    steps: int
    shares: dict[int, int]
    tensors: int
    # whether the script had updated its weights itself before its first step was seen
    moved: bool = False
    # the one save whose values all tensors of each rank have; 0 for none
    ranks: tuple[int, ...] = ()

    @property
    def mixed(self) -> bool:
        """Whether there are tensors of one save and tensors that are of another, or of none."""
        # A mixture holds tensors of a save without holding all of any one save; a run that updated
        # its weights before its first step was seen shows nothing (faults
        # partial_overwrite_mixes_checkpoints*.yaml).
        return bool(self.shares) and self.step is None and not self.moved

    @property
    def fresh(self) -> bool:
        """Whether it started from the beginning."""
        return self.steps > 0 and not self.shares and not self.moved

    @property
    def step(self) -> int | None:
        """The one save whose values all tensors have."""
        return next((k for k, number in self.shares.items() if number == self.tensors), None)

    @property
    def mixture(self) -> str:
        """What it is a mixture of."""
        if all(self.ranks):
            return "; ".join(
                f"rank {rank} resumes from the save after step {step}"
                for rank, step in enumerate(self.ranks)
            )
        total = f"{self.tensors} tensors and shards"
        parts = [
            f"{n} of {total} are from the save after step {k}"
            for k, n in sorted(self.shares.items())
        ]
        return f"the resume starts from a mixture: {', '.join(parts)}"

    def __str__(self) -> str:
        """What happened, for a report, where it is not mixed."""
        if self.steps == 0:
            return "the resumed run ends before its first step"
        if self.moved:
            return "the resumed run had updated its weights before its first step was seen"
        if self.fresh:
            return "the resumed run starts from the beginning"
        return f"it resumes from the save after step {self.step}, bitwise"


class MixtureRule(Rule):
    """A rule that a resume after a crash in a save, or from a damaged checkpoint, starts from one
    save as a whole.
    """

    fault: ClassVar[Literal["crash", "damaged"]]

    def judge(self, evidence: Evidence) -> Finding:
        attempts = [(crash.note, crash, resumed) for crash, resumed in evidence.crashes]
        line = save_line(evidence)
        if self.fault == "damaged":
            attempts = [(run.note, evidence.trained, run) for run in evidence.damaged]
            line = load_line(evidence)
        if not attempts:
            return self.unknown(
                evidence.missing.get(
                    self.fault, "no save was interrupted and no checkpoint damaged"
                )
            )
        # If a resume from the intact checkpoint is not exact either, what a resume after a crash
        # holds cannot be distinguished from that.
        if reason := not_exact(evidence):
            return self.unknown(reason)
        notes = []
        for note, saved, resumed in attempts:
            outcome = outcome_of(saved, resumed, evidence.resume)
            if outcome.mixed:
                apart = all(outcome.ranks)
                return self.failed(
                    f"{note}: {outcome.mixture}", load_line(evidence) if apart else line
                )
            notes.append(f"{note}: {outcome}")
        return self.passed("; ".join(notes))


def outcome_of(saved: Run, resumed: Run, intact: Run | None = None) -> Outcome:
    """What the first step of a resumed run finds, against every save of `saved` and its initial
    weights.

    `intact`: the exact resume from the intact checkpoint; what it does not hold, the script makes
    anew.
    """
    found = resumed.at_step(Step, 1)
    if not found:
        return Outcome(0, {}, 0)
    held = _held(saved)
    origins = _origins(saved, held, found)
    all_origins = [steps for own in origins for steps in own.values()]
    counts = Counter(step for steps in all_origins for step in steps)
    # A tensor that never changes is the same in every save: only one that is of a single save
    # shows which one was loaded (frozen weights (zoo/lora_adapters.py)).
    telling = {steps[0] for steps in all_origins if len(steps) == 1}
    shares = {step: n for step, n in counts.items() if step > 0 and step in telling}
    restarted = counts[0] == len(all_origins)
    moved = not shares and not restarted and not any(record.cls for record in found)
    exact = intact.at_step(Step, 1) if intact is not None else []
    tensors = 0
    for rank, own in enumerate(origins):
        saved_names = {name for step in shares for name in held[step].get(rank, ())}
        due = {name for name in saved_names if _shows(found[rank], name)}
        # What even the resume from the intact checkpoint does not hold, the script makes anew: its
        # absence after a crash is no mixture.
        if rank < len(exact):
            due &= _flat(exact[rank]).keys()
        tensors += len(due | own.keys())
    ranks = (max(set(held).intersection(*own.values()), default=0) for own in origins)
    return Outcome(len(found), shares, tensors, moved, tuple(ranks))


def _origins(saved: Run, held: _Held, found: list[Step]) -> list[dict[str, list[int]]]:
    """For each rank of a resumed run {tensor: the saves that have its value, and 0 for the
    beginning}.
    """
    given = _given(saved)
    origins = []
    for rank, record in enumerate(found):
        own = {}
        for name, value in _flat(record).items():
            key = tuple(value) if isinstance(value, list) else None
            # A save may hold other values than the next step begins with (an average put into the
            # model): what was given to the save counts as well (exam: averages in the model during
            # a save).
            own[name] = [
                step
                for step, ranks in held.items()
                if value in ranks.get(rank, {}).get(name, ()) or key in given.get((step, rank), ())
            ]
        origins.append(own)
    return origins


def _shows(record: Step, name: str) -> bool:
    """Whether the first step of a resumed run records a tensor, if that was restored."""
    # Of a GAN resumed after a crash only the optimizer that steps first is recorded: the state of
    # the second one is no missing part of the save (exam round 4 l_12_coroutine_gan).
    if "/" in name:
        return name.rpartition("/")[0] in record.held
    # The weights of a model whose first call comes after the first step are not recorded there.
    return name in record.weights


def _held(run: Run) -> _Held:
    """What the ranks hold at every save and, under 0, at the beginning.

    A rank has a value at the call of the save, and one at its next step: they differ where it puts
    others into the model for the save, such as an average, or where it does not call the save
    function itself.
    """
    records: list[tuple[int, int, Step | Saving]] = [
        (save.after, save.rank, save.record) for save in all_saves(run)
    ]
    steps = {0, *(step for step, _, _ in records)}
    records += [(r.step - 1, t.rank, r) for t in run.traces for r in t.steps if r.step - 1 in steps]
    out: _Held = {step: {} for step in steps}
    for step, rank, record in records:
        values = out[step].setdefault(rank, {})
        for name, value in _flat(record).items():
            values.setdefault(name, []).append(value)
    return out


def _given(run: Run) -> dict[tuple[int, int], set[tuple[float, ...]]]:
    """{(step, rank): the tensors that the rank gave to its saves after it}, under whatever keys."""
    found: dict[tuple[int, int], set[tuple[float, ...]]] = {}
    for save in all_saves(run):
        sketches = (entry.sketch for entry in save.entries.values())
        found.setdefault((save.after, save.rank), set()).update(
            tuple(s) for s in sketches if s and s[0] > 0.0
        )
    return found


def _flat(record: Step | Saving, known: Collection[str] | None = None) -> dict[str, Any]:
    """Weights (those of `known` parameters) and optimizer state of a record under one kind of
    name.
    """
    state = {
        f"{name}/{key}": value
        for name, entry in record.state.items()
        for key, value in entry.items()
    }
    return {
        name: value for name, value in record.weights.items() if known is None or name in known
    } | state


def not_exact(evidence: Evidence) -> str:
    """Why a resume after a fault cannot be judged: one without a fault is not exact either; "" if
    it is.
    """
    pair = first_steps(evidence)
    if isinstance(pair, str):
        return pair
    exact = all(_flat(s, r.weights) == _flat(r) for s, r in zip(*pair, strict=True))
    return "" if exact else "a resume from the intact checkpoint does not restore everything either"
