"""What a run that resumed after a crash, or from a damaged checkpoint, started from."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ...analysis.saves import all_saves
from ...trace.events import Saving, Step
from ..base import Evidence, Finding, Rule, Run
from ._resumed import first_steps, load_line, save_line


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
    expected = (
        [_flat(record).keys() for record in intact.at_step(Step, 1)] if intact is not None else []
    )
    if not found:
        return Outcome(0, {}, 0)
    held, given = _held(saved), _given(saved)
    shares: dict[int, int] = {}
    # a tensor that never changes is the same in every save: it shows none of them
    telling: set[int] = set()
    units: set[tuple[int, str]] = set()
    ranks = []
    for rank, record in enumerate(found):
        whole = set(held)
        for name, value in _flat(record).items():
            units.add((rank, name))
            key = tuple(value) if isinstance(value, list) else None
            known = [(k, ranks.get(rank, {}).get(name, [])) for k, ranks in held.items()]
            # A save may hold other values than the next step begins with (an average put into the
            # model): what was given to the save counts as well (exam: averages in the model during
            # a save).
            same = [k for k, values in known if value in values or key in given.get((k, rank), ())]
            shares |= {k: shares.get(k, 0) + 1 for k in same}
            # A tensor that never changes is the same in every save: only one that is of a single
            # save shows which one was loaded (frozen weights (zoo/lora_adapters.py)).
            telling |= set(same) if len(same) == 1 else set()
            whole &= set(same)
        ranks.append(max(whole, default=0))
    restarted = shares.get(0, 0) == len(units)
    moved = (
        not any(record.cls for record in found)
        and not restarted
        and not any(k in telling for k in shares if k > 0)
    )
    shares = {k: number for k, number in shares.items() if k > 0 and k in telling}
    for k in shares:
        for rank, values in held[k].items():
            # Of a GAN resumed after a crash only the optimizer that steps first is recorded: the
            # state of the second one is no missing part of the save (exam round 4
            # l_12_coroutine_gan).
            own = found[rank].held  # another optimizer's state is recorded when it steps
            # A model whose first call comes after the first step has no record there: its weights
            # are not counted as missing.
            found_here = found[rank].weights  # a model that is called later is not known yet
            # What even the resume from the intact checkpoint does not hold, the script makes anew:
            # its absence after a crash is no mixture.
            known_here = [n for n in values if rank >= len(expected) or n in expected[rank]]
            units |= {
                (rank, n)
                for n in known_here
                if (n.rpartition("/")[0] in own if "/" in n else n in found_here)
            }
    return Outcome(len(found), shares, len(units), moved, tuple(ranks))


def _held(run: Run) -> dict[int, dict[int, dict[str, list[Any]]]]:
    """{step: {rank: {tensor: its values}}} of every save and, under 0, of the beginning.

    A rank has a value at the call of the save, and one at its next step: they differ where it puts
    others into the model for the save, such as an average, or where it does not call the save
    function itself.
    """
    records: list[tuple[int, int, Step | Saving]] = [
        (save.after, save.rank, save.record) for save in all_saves(run)
    ]
    steps = {0, *(step for step, _, _ in records)}
    records += [(r.step - 1, t.rank, r) for t in run.traces for r in t.steps if r.step - 1 in steps]
    out: dict[int, dict[int, dict[str, list[Any]]]] = {step: {} for step in steps}
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
