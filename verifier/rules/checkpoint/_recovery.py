"""What a run that resumed after a crash, or from a damaged checkpoint, came back with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...analysis.saves import all_saves
from ...analysis.wording import count
from ...evidence import Evidence
from ...trace import Run
from ...trace.events import Saving, Step
from ._resumed import first_steps

NEEDS = frozenset({"train", "resume", "crash"})


@dataclass(frozen=True)
class Outcome:
    """What a resumed run started from. `shares`: {step after which it was saved: tensors that have that save's values only}."""

    steps: int
    shares: dict[int, int]
    tensors: int

    @property
    def mixed(self) -> bool:
        """Whether there are tensors of one save and tensors that are of another, or of none."""
        return bool(self.shares) and self.step is None

    @property
    def fresh(self) -> bool:
        """Whether it started from the beginning."""
        return self.steps > 0 and not self.shares

    @property
    def step(self) -> int | None:
        """The one save whose values all tensors have."""
        whole = [k for k, number in self.shares.items() if number == self.tensors]
        return whole[0] if whole else None


def outcome_of(saved: Run, resumed: Run) -> Outcome:
    """What the first step of a resumed run finds, against every save of `saved` and its initial weights."""
    found = resumed.at_step(Step, 1)
    if not found:
        return Outcome(0, {}, 0)
    held, given = _held(saved), _given(saved)
    shares: dict[int, int] = {}
    telling: set[int] = set()  # a tensor that never changes is of every save: it speaks for none
    units: set[tuple[int, str]] = set()
    for rank, record in enumerate(found):
        for name, value in _flat(record).items():
            units.add((rank, name))
            same = [
                k
                for k, ranks in held.items()
                if value in ranks.get(rank, {}).get(name, []) or _key(value) in given.get((k, rank), ())
            ]
            shares |= {k: shares.get(k, 0) + 1 for k in same}
            telling |= set(same) if len(same) == 1 else set()
    shares = {k: number for k, number in shares.items() if k > 0 and k in telling}
    units |= {(rank, name) for k in shares for rank, values in held[k].items() for name in values}
    return Outcome(len(found), shares, len(units))


def _held(run: Run) -> dict[int, dict[int, dict[str, list[Any]]]]:
    """{step: {rank: {tensor: its values}}} of every save and, under 0, of the beginning.

    A rank has a value at the call of the save, and one at its next step: they differ where it puts others into the model
    for the save, such as an average, or where it does not call the save function itself.
    """
    out: dict[int, dict[int, dict[str, list[Any]]]] = {0: {}}
    for save in all_saves(run):
        _add(out.setdefault(save.after, {}).setdefault(save.rank, {}), save.record)
    for step, ranks in out.items():
        for trace in run.traces:
            after = next((r for r in trace.steps if r.step == step + 1), None)
            if after is not None:
                _add(ranks.setdefault(trace.rank, {}), after)
    return out


def _add(values: dict[str, list[Any]], record: Step | Saving) -> None:
    for name, value in _flat(record).items():
        if value not in values.setdefault(name, []):
            values[name].append(value)


def _given(run: Run) -> dict[tuple[int, int], set[tuple[float, ...]]]:
    """{(step, rank): the tensors that the rank gave to its saves after it}, under whatever keys."""
    found: dict[tuple[int, int], set[tuple[float, ...]]] = {}
    for save in all_saves(run):
        sketches = (entry.sketch for entry in save.entries.values())
        found.setdefault((save.after, save.rank), set()).update(tuple(s) for s in sketches if s and s[0] > 0.0)
    return found


def _key(value: object) -> tuple[float, ...] | None:
    return tuple(value) if isinstance(value, list) else None


def _flat(record: Step | Saving) -> dict[str, Any]:
    """Weights and optimizer state of a record under one kind of name."""
    state = {f"{name}/{key}": value for name, entry in record.state.items() for key, value in entry.items()}
    return {**record.weights, **state}


def not_exact(evidence: Evidence) -> str | None:
    """Why nothing can be said of a resume after damage: one without damage is not as saved either."""
    pair = first_steps(evidence)
    if isinstance(pair, str):
        return pair
    if any(_flat(s) != _flat(r) for s, r in zip(*pair, strict=True)):
        return "a resume from the whole checkpoint does not bring all back either"
    return None


def words(outcome: Outcome) -> str:
    if outcome.steps == 0:
        return "the resume refuses it"
    if outcome.fresh:
        return "the run starts from the beginning"
    return f"all {count(outcome.tensors, 'tensor')} are of the save after step {outcome.step}"
