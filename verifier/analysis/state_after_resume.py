"""State beside the weights after a resume: what each rank begins with that it did not have without
the resume.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from ..evidence import Evidence
from ..tolerances import SAME_STATE
from ..trace import Run
from ..trace.events import Held, Step
from .state import (
    KEPT,
    apart,
    assigned_anew,
    attribute,
    begun_anew,
    decisive,
    evolving,
    measuring,
    of_one_branch,
    restorable,
    results_of_calls,
    whole,
)

_MOST = 3  # holders that are named one by one
# holders of what outlives a function call
_OWNED = ("module", "optimizer", "scheduler", "scaler", "object", "generator")
Pairs = Mapping[str, tuple[Held | None, Held | None]]  # {path: (with, without the resume)}


@dataclass(frozen=True)
class Beginning:
    """`lost`: state that a resumed run must have again and has not; `other`: further values of
    objects that are not the same; in words. `compared` counts the values that must be the same;
    `paths` are those of what is lost.
    """

    lost: list[str]
    other: list[str]
    compared: int
    paths: frozenset[str] = frozenset()


def beginning(evidence: Evidence, train: Run, resume: Run, step: int) -> Beginning:
    """What the resumed run has at its first step that the uninterrupted run had not at the same
    `step`.
    """
    lost: list[str] = []
    other: list[str] = []
    known: set[str] = set()  # paths that an earlier rank has
    paths: set[str] = set()
    compared = 0
    # A resume on fewer ranks has no state of the others to compare.
    for rank in range(min(len(train.traces), len(resume.traces))):
        must, may, number = _of_rank(evidence, train, resume, step, rank)
        compared += number
        on = f" on rank {rank}" if rank else ""
        lost += [
            words + on
            for words in named({path: pair for path, pair in must.items() if path not in known})
        ]
        other += [
            words + on
            for words in named({path: pair for path, pair in may.items() if path not in known})
        ]
        known |= must.keys() | may.keys()
        paths |= must.keys()
    return Beginning(lost, other, compared, frozenset(paths))


def _of_rank(
    evidence: Evidence, train: Run, resume: Run, step: int, rank: int
) -> tuple[Pairs, Pairs, int]:
    """What one rank must have again and has not, what else of its objects is not the same, and how
    many values must be the same.
    """
    sources = evidence.sources
    mine, theirs = whole(resume, 1, rank), whole(train, step, rank)
    # What is sharded is compared once, whole.
    both = {path for path in mine.keys() & theirs.keys() if not (rank and theirs[path].sharded)}
    functions, results = begun_anew(sources), results_of_calls(sources)
    changing = {path for path in evolving(train, rank) if path.partition(".")[0] not in functions}
    anew, deciding = assigned_anew(sources) | of_one_branch(sources), decisive(sources, changing)
    # If the resumed step has other samples, tensors of the loop may be those samples; that is
    # another rule's finding.
    same_samples = resume.global_batch(1) == train.global_batch(step)

    def due(path: str) -> bool:
        """Whether a resume must bring a value back."""
        held = theirs[path]
        # Results of the last forward are made again by the next: no state that a resume must bring
        # back (exam r4 k_12_moe_balance, r8 ga_16_vqvae_codebook_ema).
        if held.holder == "module" and attribute(path) in results:
            return False
        known = same_samples or held.holder in KEPT or held.sketch is None
        named_anew = tuple(path.rsplit(".", 1)) in anew
        return known and not named_anew and restorable(path, held, deciding)

    must = {path for path in changing & both if due(path)}
    unlike = {path for path in both if apart(mine[path], theirs[path]) > SAME_STATE}
    lost = (must & unlike) - _set_again(train, resume, step, rank)
    lost -= _of_first_step(train, resume, lost, rank)
    # A schedule that counts on from a step that was saved has another `last_epoch`, and the same
    # rates (savinasun/SpikeSparseSink: `schedule(x + start_step)`).
    if _same_rates(train, resume, step):
        lost = {path for path in lost if theirs[path].holder != "scheduler"}
    gone = (theirs.keys() - mine.keys()) & changing
    objects = {
        path
        for path, held in theirs.items()
        if held.holder in _OWNED and attribute(path) not in results
    }
    other = ((unlike | gone) & objects) - lost
    other -= measuring(sources, other)

    def pairs(paths: set[str]) -> Pairs:
        return {path: (mine.get(path), theirs.get(path)) for path in sorted(paths)}

    return pairs(lost), pairs(other), len(must)


def _set_again(train: Run, resume: Run, step: int, rank: int) -> set[str]:
    """The paths of optimizers and modules that are right one step later: the loop or a forward sets
    them in each step, before anything reads them.
    """
    # A seed in param_groups (exam r2 f_15_sgld twin: `param_groups[0]['seed']`).
    mine, theirs = whole(resume, 2, rank), whole(train, step + 1, rank)
    return {
        path
        for path in mine.keys() & theirs.keys()
        if theirs[path].holder in ("optimizer", "module")
        and apart(mine[path], theirs[path]) <= SAME_STATE
    }


def learning_rates(train: Run, resume: Run, step: int) -> list[tuple[list[float], list[float]]]:
    """(with the resume, without it) of each resumed step, the first of which is `step` without it.

    Rates are those of the optimizer that steps first, all phases numbered on as one: comparing all
    optimizers made so far failed two trainings in phases (exam round 4 l_14_progressive_distill,
    n_15_stage_boosting).
    """
    pairs = [
        (resume.at_step(Step, 1 + later), train.at_step(Step, step + later))
        for later in range(resume.steps())
    ]
    return [(mine[0].lr, theirs[0].lr) for mine, theirs in pairs if mine and theirs]


def _same_rates(train: Run, resume: Run, step: int) -> bool:
    """Whether learning rates that change from step to step are those without the resume."""
    rates = learning_rates(train, resume, step)
    changing = any(one != other for (one, _), (other, _) in pairwise(rates))
    return changing and all(mine == theirs for mine, theirs in rates)


def _of_first_step(train: Run, resume: Run, paths: set[str], rank: int) -> set[str]:
    """Numbers that a process has at its first step alone, and all later ones have otherwise: the
    same two in both runs. They say that a process has begun (OLMo-core: `callback._first_step`).
    """

    def values(run: Run, path: str) -> list[float | None]:
        held = (whole(run, at, rank).get(path) for at in range(1, run.steps() + 1))
        return [one.value for one in held if one is not None]

    found = set()
    for path in paths:
        first, *later = values(train, path)
        again, *after = values(resume, path)
        both = {*later, *after}
        if first is not None and first == again and after and len(both) == 1:
            found.add(path)
    return found


def named(lost: Pairs) -> list[str]:
    """What is lost, in words: numbers with both values, tensors by the variable or module that
    holds them.
    """
    numbers, holders = [], Counter[str]()
    for path, (now, then) in lost.items():
        if (now or then).sketch is not None:  # type: ignore[union-attr]  # one of both is there
            holders[path] += 1
        elif (now or then).holder == "generator":  # type: ignore[union-attr]
            numbers.append(f"the state of `{path}`")
        else:
            numbers.append(f"`{path}` = {_shown(now)} instead of {_shown(then)}")
    while len(holders) > _MOST and any(holder(path) != path for path in holders):
        shorter: Counter[str] = Counter()
        for path, number in holders.items():
            shorter[holder(path)] += number
        holders = shorter
    return numbers + [
        f"`{path}`" + (f" ({number} tensors)" if number > 1 else "")
        for path, number in holders.items()
    ]


def _shown(held: Held | None) -> str:
    return "nothing" if held is None or held.value is None else f"{held.value:.6g}"


def holder(path: str) -> str:
    """What holds a value: `main.ema['head.weight']` -> `main.ema`."""
    return re.sub(r"(\[[^\[]*\]|\.\w+)$", "", path)
