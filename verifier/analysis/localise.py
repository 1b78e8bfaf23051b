"""Where two runs of the same script, known to differ, begin to differ, and which class of fault the
pattern indicates.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile

from ..tolerances import NAMED_FACTOR
from ..trace import Run, difference
from ..trace.events import Held, Place, Step, Traffic
from .comparison import (
    Gradients,
    changes,
    changes_between,
    divided,
    first_gradients,
    gradients_apart,
    length,
    loss_apart,
    norm_apart,
    update_apart,
    without_gradients,
)
from .divergence import Frame, location
from .gradient_scale_causes import readings, words
from .state import apart, whole
from .state_after_resume import named
from .wording import count, some


@dataclass(frozen=True)
class Parting:
    """`stage`: the first of "gradient", "clip" (between backward and step), "optimizer" that
    differs in step 1, else "later"; "loss" if no gradient or weight differs.
    """

    stage: str
    step: int
    parameters: tuple[str, ...]  # in the model's order; those that differ at that step
    whole: int  # number of compared parameters
    factor: float | None  # every differing gradient is this multiple of the oracle's

    @property
    def module(self) -> str:
        """The smallest module that holds every parameter that differs; "" for the whole model."""
        if not self.parameters or len(self.parameters) == self.whole:
            return ""
        levels = zip(*(name.split(".")[:-1] for name in self.parameters), strict=False)
        return ".".join(parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, levels))


def part(run: Run, oracle: Run, allowed: Mapping[str, float]) -> Parting:
    """Where `run` first differs from `oracle` by more than is allowed."""
    for stage, at_step, name in (
        ("gradient", False, "first gradient"),
        ("clip", True, "gradient at the step"),
    ):
        apart = gradients_apart(run, oracle, at_step)
        wrong = [key for key in _in_order(run, apart) if not apart[key] <= allowed[name]]
        if wrong:
            factor = _factor(*first_gradients(run, oracle, at_step), wrong)
            return Parting(stage, 1, tuple(wrong), len(apart), factor)
    # else the loss says nothing about later steps
    by_loss = loss_apart(run, oracle, 1) <= allowed["loss"]
    for step in range(1, min(run.steps(), oracle.steps()) + 1):
        agrees = not by_loss or loss_apart(run, oracle, step) <= allowed["loss"]
        if step > 1 and not (agrees and norm_apart(run, oracle, step) <= allowed["gradient norm"]):
            return Parting("later", step, (), len(run.parameters), None)
        if not update_apart(run, oracle, step)[0] <= allowed["update"]:
            moved = _in_order(run, _updates_that_differ(run, oracle, step, allowed["update"]))
            return Parting(
                "optimizer" if step == 1 else "later", step, tuple(moved), len(run.parameters), None
            )
    return Parting("loss", 1, (), len(run.parameters), None)


def _in_order(run: Run, names: Mapping[str, float]) -> list[str]:
    return [name for name in dict.fromkeys([*run.parameters, *names]) if name in names]


def _updates_that_differ(run: Run, oracle: Run, step: int, allowed: float) -> dict[str, float]:
    mine, theirs, parts = changes(run, step), changes(oracle, step), divided(run, oracle)
    differing = (
        (name, mine.get(name, [0.0] * len(b)), b) for name, b in theirs.items() if name not in parts
    )
    apart = {
        name: difference(a, b) / max(difference(b, [0.0] * len(b)), 1e-30)
        for name, a, b in differing
    }
    return {name: value for name, value in apart.items() if not value <= allowed} or apart


def _factor(mine: Gradients, theirs: Gradients, names: list[str]) -> float | None:
    """The one number by which all these gradients differ from the oracle's; None if there is no
    such number.
    """
    ratios, straight = [], []
    for name in names:
        a, b = mine.get(name), theirs.get(name)
        if a is None or b is None or not (a[0] > 0.0 and b[0] > 0.0):
            return None
        ratio = math.sqrt(a[0] / b[0])
        ratios.append(ratio)
        straight.append(
            difference(a, [ratio * x for x in b]) <= 10 * NAMED_FACTOR * math.sqrt(a[0])
        )
    middle = sorted(ratios)[len(ratios) // 2]
    same = sum(
        s and abs(r / middle - 1.0) <= NAMED_FACTOR for s, r in zip(straight, ratios, strict=True)
    )
    return middle if same >= 0.9 * len(ratios) else None


_MEANINGS = {
    "clip": "gradients agree after backward, not at the step{factor}: a clip or code in between",
    "optimizer": (
        "gradients agree and the update does not: the optimizer's arithmetic, parameter groups or"
        " state"
    ),
    "without gradients": (
        "there are no gradients: the losses, draws or sums that make the update are those of one"
        " rank"
    ),
    "later": (
        "the steps before agree: state carried between steps (gradients not cleared, optimizer"
        " state, learning rate)"
    ),
    "loss": (
        "the losses differ and no gradient does: the reported loss is not the one that is minimised"
    ),
    "gradient": "the gradients differ in direction",
}
_OTHERS = {  # by the compared oracle and the result of the other one
    "DDP differs": "; one process differs too: the fault is in code on shards",
    "single agrees": (
        "; DDP agrees: the loss is normalised or the data are split wrongly over ranks"
    ),
    "single differs": "; DDP differs too: it is not only the data split",
}


def meaning(
    parting: Parting,
    run: Run,
    label: str,
    other: str | None,
    oracle: Run | None,
    allowed: Mapping[str, float],
) -> str:
    """What the pattern means.

    `other`: whether the second oracle "agrees" or "differs"; None if that is not known.
    """
    if parting.stage == "gradient" and parting.factor is not None:
        if known := words(readings(parting.factor, run, oracle)):
            return f"{_times(parting.factor, label)}: {known}"
    elif oracle is not None and (known := other_rates(parting, run, oracle, label, other)):
        return known
    text = _pattern(parting, run, label, oracle)
    if (
        label != "DDP"
        and other == "agrees"
        and oracle is not None
        and (known := _on_ranks(parting, run, oracle, allowed))
    ):
        return known if text == _MEANINGS["gradient"] else f"{text}; {known}"
    return text + _OTHERS.get(f"{'DDP' if label == 'DDP' else 'single'} {other}", "")


def _pattern(parting: Parting, run: Run, label: str, oracle: Run | None) -> str:
    """What differs first, and by which factor."""
    if parting.stage == "gradient" and parting.factor is not None:
        return _times(parting.factor, label)
    later = parting.stage == "later"
    if later and oracle is not None and (known := since(parting, run, oracle, label)):
        return known
    stage = parting.stage
    if without_gradients(run) and stage in ("optimizer", "later"):
        stage = "without gradients"
    factor = f" (by {parting.factor:.4g} x)" if parting.factor is not None else ""
    return _MEANINGS[stage].format(factor=factor)


def _times(factor: float, label: str) -> str:
    return f"these gradients are {factor:.4g} x those of {label}"


def other_rates(parting: Parting, run: Run, oracle: Run, label: str, other: str | None) -> str:
    """At which step, up to the one that differs, the learning rates first differ; "" if they
    agree, or the gradients differ before.

    DDP has as many ranks, and whole weights: what differs there is made of a rank's shards.
    """
    if parting.stage not in ("optimizer", "later"):
        return ""
    for step in range(1, parting.step + 1):
        for mine, theirs in zip(
            run.at_step(Step, step)[:1], oracle.at_step(Step, step)[:1], strict=False
        ):
            pairs = [
                (a, b)
                for a, b in zip(mine.lr, theirs.lr, strict=False)
                if not math.isclose(a, b, rel_tol=NAMED_FACTOR)
            ]
            if pairs and len(mine.lr) == len(theirs.lr):
                rates = (
                    f"the learning rate of step {step} is {pairs[0][0]:.4g}, and {pairs[0][1]:.4g}"
                    f" in {label}"
                )
                if label == "DDP" or other == "differs":
                    return (
                        f"{rates}: it is computed from this rank's shards (their shape, their"
                        " number of elements, their norm) and not from whole parameters"
                    )
                return (
                    f"{rates}: what the schedule is made of (a length, a number of steps) depends"
                    " on the number of ranks"
                )
    return ""


def since(parting: Parting, run: Run, oracle: Run, label: str) -> str:
    """What was otherwise first where two runs part in a later step: state, or what changes weights
    between two steps; "" if neither.
    """
    return _begun_otherwise(parting, run, oracle, label) or _changed_between(
        parting, run, oracle, label
    )


def _begun_otherwise(parting: Parting, run: Run, oracle: Run, label: str) -> str:
    """Which state a step begins with that is not the oracle's, the last time before the two part
    that there is any.
    """
    last, pairs, known = 0, dict[str, tuple[Held | None, Held | None]](), set[str]()
    for step in range(1, parting.step + 1):
        mine, theirs = whole(run, step), whole(oracle, step)
        same = {
            path for path in mine.keys() & theirs.keys() if mine[path].numel == theirs[path].numel
        }
        new = {path for path in same - known if apart(mine[path], theirs[path]) > NAMED_FACTOR}
        known |= new
        new = {path for path in new if mine[path].holder != "generator"}
        sums = {
            path for path in new if mine[path].holder == "local" and mine[path].value is not None
        }
        if step > 1 and new:  # what is a number of the loop may be a sum for a log
            last, pairs = (
                step,
                {path: (mine[path], theirs[path]) for path in sorted(new - sums or new)},
            )
    return (
        f"the steps before agree; step {last} begins with other state than in {label}:"
        f" {some(named(pairs), 3)}"
        if pairs
        else ""
    )


def _changed_between(parting: Parting, run: Run, oracle: Run, label: str) -> str:
    """Which weights code between two optimizer steps changes otherwise than in the oracle."""
    parts = divided(run, oracle)
    for step in range(2, parting.step + 1):
        mine, theirs = changes_between(run, step), changes_between(oracle, step)
        pairs = {
            name: (mine.get(name, [0.0] * len(change)), change)
            for name, change in theirs.items()
            if name not in parts
        }
        apart = [
            name
            for name, (a, b) in pairs.items()
            if difference(a, b) > NAMED_FACTOR * max(length(a), length(b))
        ]
        if apart:
            known = f"so do the weights behind step {step - 1}"
            return (
                f"the steps before agree, {known}; code between it and step {step} changes"
                f" {some(apart)} otherwise than in {label}"
            )
    return ""


def _on_ranks(parting: Parting, run: Run, oracle: Run, allowed: Mapping[str, float]) -> str:
    """What it means that one process differs and DDP does not, as far as the records show it."""
    if parting.stage == "clip":
        if times := counted_times(parting):
            counted = f"the squared norm counts each gradient {times} times"
            return (
                f"{parting.factor:.4g} is 1/sqrt({times}): {counted}, as a sum over ranks that hold"
                " the same one does"
            )
        return "DDP agrees: what it computes depends on the number of ranks, not on their shards"
    if exchanged(parting, run, oracle, allowed):
        lines = {
            _short(e.at_line)
            for r in run.places(Traffic)
            if r.step == 1
            for e in r.lines
            if e.at_line
        }
        places = some(sorted(lines), 2) if lines else "the forward"
        exchange = f"what ranks exchange in {places} must pass gradients back"
        known = f"the loss is that of one process, its gradient is not: {exchange}"
        return known + _behind(parting, run)
    if run.cut_within(1, oracle) and parting.stage != "later":
        return (
            "DDP agrees, and the ranks have parts of the same samples: what the model computes over"
            " a whole sample (a mean, a variance, a norm) is not that of all its parts"
        )
    if parting.stage == "later" and since(parting, run, oracle, "one process"):
        return "DDP agrees: what it is made of depends on the number of ranks"
    return _weighed(run, oracle) if parting.stage == "gradient" else ""


def exchanged(parting: Parting, run: Run, oracle: Run, allowed: Mapping[str, float]) -> bool:
    """Whether the first loss is that of the oracle and its gradient is not: the forward is right,
    and its backward wrong.
    """
    return parting.stage == "gradient" and loss_apart(run, oracle, 1) <= allowed["loss"]


def _behind(parting: Parting, run: Run) -> str:
    """That the gradients of what comes behind the last wrong one in the model agree: the fault is
    between the two.
    """
    if not parting.parameters:
        return ""
    last = parting.parameters[-1]
    names = [name for name, entries in run.parameters.items() if entries[0].trainable]
    after = names[names.index(last) + 1 :] if last in names else []
    return f"; {last} is the last that differs" if after else ""


def counted_times(parting: Parting) -> int:
    """How many times a clip counts each gradient in its squared norm; 0 where it is not that."""
    times = parting.factor**-2 if parting.stage == "clip" and parting.factor else 0.0
    whole = math.isclose(times, round(times), rel_tol=NAMED_FACTOR)
    return round(times) if whole and round(times) > 1 else 0


def reduced_after_backward(run: Run) -> Place | None:
    """The line that all-reduces between the first backward and the first step; None if there are
    several, or none.
    """
    lines: set[Frame] = set()
    backward = False
    for event in run.progress.get(0, ()):
        if event.op == "step":
            break
        backward = backward or event.op == "backward"
        if backward and event.op == "all_reduce" and event.frames:
            lines.add(event.frames[0])
    return location(lines.pop()) if len(lines) == 1 else None


def _short(place: Place) -> str:
    return f"{place.file.rpartition('/')[2]}:{place.line}"


def _weighed(run: Run, oracle: Run) -> str:
    """Whether one process has another mean of the same losses of the ranks: each divides by a count
    of its own.
    """
    micros, whole = run.micros(1), oracle.objective(1)
    ranks = [[m.loss for m in micros[rank]] for rank in run.data_ranks if rank < len(micros)]
    known = [
        sum(loss for loss in own if loss is not None) for own in ranks if own and None not in own
    ]
    if whole is None or len(known) < max(2, len(ranks)) or not min(known) < whole < max(known):
        return ""
    texts = " and ".join(f"{loss:.4g}" for loss in known[:4])
    as_if = f"one process has {whole:.4g}, between the {texts} of the ranks but not their mean"
    if len(known) == 2:
        share = (whole - known[1]) / (known[0] - known[1])
        as_if = f"{as_if} (as if weighed {share:.0%} to {1 - share:.0%})"
    return (
        f"{as_if}: so it is where each rank divides its sum by a count of its own and not by that"
        " of all ranks"
    )


def where(parting: Parting) -> str:
    """`from step 1 on in 2 of 27 parameters, all under blocks, first blocks.0.norm.weight`."""
    text, number = f"from step {parting.step} on", len(parting.parameters)
    if not number:
        return text
    inside = f", all under {parting.module}" if number > 1 and parting.module else ""
    first = f"{', first' if number > 1 else ':'} {parting.parameters[0]}"
    return f"{text} in {number} of {count(parting.whole, 'parameter')}{inside}{first}"
