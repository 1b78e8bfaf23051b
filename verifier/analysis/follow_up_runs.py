"""Which further runs the train run makes useful."""

from collections.abc import Collection
from typing import Any

from ..evidence import Evidence
from ..trace import Run
from ..trace.events import Clips, Step, signature
from .scaling import clip_was_reached


def clip_is_open(evidence: Evidence) -> bool:
    """Whether the script may clip gradients that the train run did not make large enough: huge ones
    would show it.
    """
    train = evidence.train
    if train is None or train.steps() == 0 or clip_was_reached(train):
        return False
    return evidence.gradients or changes_gradients(train)


def changes_gradients(train: Run) -> bool:
    """Whether a clip was called, or gradients changed between backward and the optimizer step."""
    return bool(train.all(Clips)) or any(
        r.grads != r.grads_at_step for trace in train.traces for r in trace.steps
    )


def keeps_its_batch_on(ranks: int, train: Run) -> bool:
    """Whether this script keeps its global batch on `ranks` ranks, judged by its train run."""
    # A mesh of two dims need not divide by 3: no extra world size is tried.
    if any(len(e[0].mesh) > 1 for e in train.parameters.values()):
        return False
    batch, micros = train.global_batch(1).total(), train.micros(1)
    largest = max((len(m.rows) for rank in micros for m in rank), default=0)
    several = any(len(rank) > 1 for rank in micros)
    # Only where the batch divides does another number of ranks keep it: exam round 1's right
    # scripts failed on 3 ranks.
    return batch > 0 and batch % (ranks * largest if several else ranks) == 0


def for_a_resume(train: Run, after: int | None) -> dict[str, Any]:
    """What a resume after a step is given of the train run: `models` and `retired`, if it has
    several, and `in_phases` of a Request.
    """
    held = [
        frozenset(r.held)
        for r in train.traces[0].of(Step)
        if r.optimizer == train.traces[0].first_optimizer
    ]
    # Optimizers of phases hold disjoint parameters; a resume at the last step of a phase makes a
    # single step of it (exam round 12 (phases); no case by name).
    given: dict[str, Any] = {"in_phases": any(held[0].isdisjoint(one) for one in held)}
    found = {
        m.root: signature((p.name.removeprefix(m.root), p.shape) for p in m.parameters)
        for m in train.models
    }
    if len(found) > 1:
        last = train.steps()
        saved = after or 0
        before = _held(train, 1, saved)
        later = _held(train, min(saved + 1, last), last)
        retired = [
            root
            for root in found
            # A resume does not make models of earlier stages: without this the later one got the
            # earlier one's number (exam round 12: models of stages with the same shapes
            # (nc_14_stagewise_boost)).
            if _inside(root, found, before) and not _inside(root, found, later)
        ]
        given |= {"models": found, "retired": retired}
    return given


def _held(train: Run, first: int, last: int) -> set[str]:
    """The parameters that optimizers hold in these steps."""
    return {
        name
        for trace in train.traces
        for r in trace.of(Step)
        if first <= r.step <= last
        for name in r.held
    }


def _inside(root: str, roots: Collection[str], names: set[str]) -> bool:
    """Whether one of these names is of this model."""
    return any(max((r for r in roots if name.startswith(r)), key=len) == root for name in names)
