import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from ...analysis.ending import changes_later
from ...analysis.exports_in_place import exports_in_place
from ...tolerances import LATE, TAKEN_OUT
from ...trace import Trace
from ...trace.events import Reached, State, Step, Stepped
from ...trace.sketches import difference
from ..base import Evidence, Finding, Rule, Run, count, some


class SameModelThroughout(Rule):
    """The same model is trained in every step: each trained parameter has one optimizer, modes and
    frozen weights do not change.

    Why: a parameter that receives gradients and that no optimizer holds stays at its initial value;
    one that two optimizers hold moves twice. A model that an evaluation leaves in eval mode trains
    on without dropout and with frozen statistics. Adapters that a release merges into the frozen
    weights beside them, and leaves there, count twice from then on. An export that divides the
    weights in place, for its file, changes those of the training. The loss falls in each case.
    Wrong:
        optimizer = torch.optim.AdamW(model.blocks.parameters())  # and the embedding and the head?
    Right:
        optimizer = torch.optim.AdamW(model.parameters())
    Fix: Give every parameter that is to be trained to exactly one optimizer, set
    `requires_grad_(False)` on the others, call `model.train()` before training goes on, and merge
    adapters into a copy, or put the frozen weights back.
    Source: law L3: the probe compares, at each step, the parameters that have gradients with those
    that optimizers hold, and the modules in eval mode with those of the first step; and frozen
    weights between two steps at which the trained ones of the same module stay. The survey run
    compares 64 elements of each parameter after a step with those before the next one.
    """

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        parameters, steps = count(len(run.parameters), "parameter"), count(run.steps(), "step")
        same = self.passed(f"{parameters}: modes and optimizers are the same in {steps}")
        return (
            self._modes(run)
            or self._optimizers(evidence, run)
            or self._frozen(run)
            or self._exported(evidence)
            or same
        )

    def _modes(self, run: Run) -> Finding | None:
        for trace in run.traces:
            records = trace.of(State)
            for record in records[1:]:
                # the models that are in eval mode as a whole; a part of a model may be frozen on
                # purpose
                roots = {
                    # A part of a model that stays in eval mode is frozen on purpose (batch norm, an
                    # encoder); a whole model that was in train mode before is forgotten
                    # (zoo/frozen_teacher.py; frozen BatchNorm layers).
                    name
                    for name in record.in_eval
                    if not name or re.fullmatch(r"model\d+\.", name)
                }
                if (
                    roots.difference(records[0].in_eval)
                    # Only an evaluation in between makes a forgotten `model.train`: a script
                    # without one switches modes on purpose.
                    and record.evaluations > records[0].evaluations
                ):
                    before = f"at step {records[0].step} it was in train mode"
                    what = (
                        f"from step {record.step} on the whole model trains in eval mode; {before}"
                    )
                    return self.failed(
                        what, record.at_line, fix="Call `model.train()` after the evaluation."
                    )
        return None

    def _optimizers(self, evidence: Evidence, run: Run) -> Finding | None:
        steps = _outermost(run.traces[0])
        held: dict[str, set[int]] = {}
        with_gradient: set[str] = set()
        for record in steps:
            for name in record.held:
                held.setdefault(name, set()).add(record.optimizer)
            with_gradient |= {
                n for n, grad in record.grads.items() if grad is not None and grad[0] > 0.0
            }
        # Tables that the script updates itself are held by no optimizer, and move: their weights
        # are compared from step to step (exam round 7 fd_16_row_sharded_tables).
        alone = sorted(n for n in with_gradient if n not in held and n not in run.changed)
        # A part that thaws in a later phase never changes in the compared steps: it is a fault only
        # if the whole survey run ends with its initial value.
        alone = [n for n in alone if not changes_later(evidence, n)]
        line = steps[0].at_line if steps else None
        # Where optimizers take turns and not all have had theirs, what no optimizer holds so far
        # may be the next one's (test_laws.py, turns and phases).
        if alone and (held or run.changed) and not _take_turns(steps):
            have = (
                f"{count(len(alone), 'parameter')} that {'have' if len(alone) > 1 else 'has'}"
                " gradients"
            )
            # An optimizer may hold copies that the script writes back (charlm_host_adam).
            nobody = "no optimizer holds" if held else "nothing updates"
            return self.failed(f"{nobody} {have} and never changed: {some(alone)}", line)
        twice = sorted(
            # In meta-learning an inner and an outer optimizer hold the same parameters rightly: two
            # optimizers are a fault only if both use one and the same gradient (exam round 2
            # f_10_reptile, round 3 j_19_fomaml_pair).
            n
            for n, numbers in held.items()
            if len(numbers) > 1 and _same_gradient(n, steps)
        )
        if twice:
            which = f"{count(len(twice), 'parameter')}: {some(twice)}"
            return self.failed(f"two optimizers use the gradient of {which}", line)
        return None

    def _frozen(self, run: Run) -> Finding | None:
        for trace in run.traces:
            trained = {name for record in trace.of(Step) for name in record.held}
            changes: list[tuple[Step, list[str]]] = []
            for record, other in _changed_between(trace):
                alone = [
                    n
                    for n in other
                    if n not in trained
                    and _beside(n, trained)
                    # If the trained adapters of the same module change as well (reset to zero,
                    # ReLoRA), merging them into the frozen weight is right (zoo/lora_adapters.py).
                    and not _beside(n, trained & {*other})
                ]
                if alone:
                    changes.append((record, alone))
            if _seldom(changes, trace):
                record, names = changes[0]
                what = (
                    f"before step {record.step} the script changed"
                    f" {count(len(names), 'frozen parameter')} ({some(names)})"
                )
                stayed = (
                    "and none of the trained ones beside: what was merged into them is still there"
                )
                return self.failed(f"{what}, {stayed}", record.at_line)
        return None

    def _exported(self, evidence: Evidence) -> Finding | None:
        """An export computes in the memory of the weights."""
        survey = evidence.survey
        records = survey.traces[0].of(Reached) if survey is not None else []
        changes = [record for record in records if record.between]
        # An update that the script makes itself comes with each step, or with many.
        seldom = 0 < 2 * len(changes) < max((record.steps for record in records), default=0)
        line = next(exports_in_place(evidence), None) if seldom else None
        if line is None:
            return None
        names = changes[0].between
        what = f"{count(len(names), 'parameter')} ({some(names)}) had other values than after the"
        return self.failed(
            f"before step {changes[0].steps} {what} step before: `{line.function}` computes in"
            " place before it writes, and the training goes on from that",
            line,
            fix="Compute the export out of place (`weight = weight / norm`), or on a `clone()`.",
        )


def _changed_between(trace: Trace) -> Iterator[tuple[Step, list[str]]]:
    """(step, names of parameters that had other values before it than after the step before)."""
    ends = {(r.optimizer, r.step): r.weights for r in trace.of(Stepped)}
    for last, record in pairwise(trace.of(Step)):
        before = ends.get((last.optimizer, last.step), {})
        yield record, [n for n, w in record.weights.items() if n in before and _apart(before[n], w)]


def _seldom(changes: Sequence[object], trace: Trace) -> bool:
    """Whether weights changed between steps, and not as a rule: one that follows others changes
    with each step (zoo/averaged_evaluation.py (followers)).
    """
    return 0 < 2 * len(changes) < len(trace.of(Step))


def _take_turns(steps: list[Step]) -> bool:
    """Whether parameters are first held when others have made several steps, or no longer held:
    what no optimizer holds may come later.
    """
    rounds = list(accumulate(record.optimizer == steps[0].optimizer for record in steps))
    last = {frozenset(record.held): number for number, record in enumerate(steps)}
    first = {frozenset(record.held): number for number, record in reversed(list(enumerate(steps)))}
    phases = any(last[one] < first[other] for one in last for other in first)
    return phases or any(rounds[number] > LATE for number in first.values())


def _apart(before: list[float], now: list[float]) -> bool:
    return bool(difference(before, now) > TAKEN_OUT * before[0] ** 0.5)


def _beside(name: str, names: set[str]) -> list[str]:
    """Those of the same module, or of the one around it: `qkv.lora_a` of `qkv.base.weight`."""
    parents = name.split(".")[:-1]
    around = ".".join(parents[:-1] if len(parents) > 1 else parents)
    return [n for n in names if around and n.startswith(f"{around}.")]


def _same_gradient(name: str, steps: list[Step]) -> bool:
    """Whether two optimizers use one gradient, one after the other.

    In meta-learning each has gradients of its own.
    """
    using = [(r.optimizer, r.grads_at_step.get(name)) for r in steps if name in r.held]
    return any(a[0] != b[0] and a[1] and a[1] == b[1] for a, b in pairwise(using))


def _outermost(trace: Trace) -> list[Step]:
    """The steps of a rank that were not made within the step of another optimizer, as a wrapper
    such as Lookahead makes them.
    """
    ends = {(r.optimizer, r.step): r.seq for r in reversed(trace.of(Stepped))}
    spans = [(s.seq, ends.get((s.optimizer, s.step), s.seq), s) for s in trace.of(Step)]
    return [
        s
        for start, end, s in spans
        # The step of an optimizer within the step of a wrapper (Lookahead) is one update, not two
        # optimizers on one parameter (Lookahead and other wrappers (test_laws.py 'one in
        # another')).
        if not any(a < start and end < b for a, b, other in spans if other is not s)
    ]
