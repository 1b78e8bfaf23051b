"""Where two runs of the same script part, and what kind of fault the pattern means.

Called once two runs are known to differ: first step, first parameter, smallest module that holds all that differs, and a sentence
on the class of the fault.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..trace import Run, difference
from .comparison import Gradients, changes, first_gradients, gradients_apart, loss_apart, norm_apart, update_apart
from .factors import readings, words

EXACT = 1e-3  # relative: how near to a number a factor must be to be called that number


@dataclass(frozen=True)
class Parting:
    """`stage`: the first of "gradient", "clip" (between backward and step), "optimizer" that differs in step 1, else "later"; "loss" if
    no gradient or weight differs."""

    stage: str
    step: int
    parameters: tuple[str, ...]  # in the model's order; those that differ where the runs part
    whole: int  # how many parameters there are to compare
    factor: float | None  # every differing gradient is this multiple of the oracle's

    @property
    def module(self) -> str:
        """The smallest module that holds every parameter that differs; "" for the whole model."""
        if not self.parameters or len(self.parameters) == self.whole:
            return ""
        paths = [name.split(".")[:-1] for name in self.parameters]
        common = []
        for parts in zip(*paths, strict=False):
            if len(set(parts)) > 1:
                break
            common.append(parts[0])
        return ".".join(common)


def part(run: Run, oracle: Run, allowed: Mapping[str, float]) -> Parting:
    """Where `run` leaves `oracle` by more than is allowed."""
    for stage, at_step, name in (("gradient", False, "first gradient"), ("clip", True, "gradient at the step")):
        apart = gradients_apart(run, oracle, at_step)
        wrong = [key for key in _in_order(run, apart) if not apart[key] <= allowed[name]]
        if wrong:
            factor = _factor(*first_gradients(run, oracle, at_step), wrong)
            return Parting(stage, 1, tuple(wrong), len(apart), factor)
    by_loss = loss_apart(run, oracle, 1) <= allowed["loss"]  # else the loss tells nothing of later steps
    for step in range(1, min(run.steps(), oracle.steps()) + 1):
        agrees = norm_apart(run, oracle, step) <= allowed["gradient norm"]
        if by_loss:
            agrees = agrees and loss_apart(run, oracle, step) <= allowed["loss"]
        if step > 1 and not agrees:
            return Parting("later", step, (), len(run.parameters), None)
        if not update_apart(run, oracle, step)[0] <= allowed["update"]:
            moved = _in_order(run, _updates_that_differ(run, oracle, step, allowed["update"]))
            return Parting("optimizer" if step == 1 else "later", step, tuple(moved), len(run.parameters), None)
    return Parting("loss", 1, (), len(run.parameters), None)


def _in_order(run: Run, names: Mapping[str, float]) -> list[str]:
    known = [name for name in run.parameters if name in names]
    return known + [name for name in names if name not in run.parameters]


def _updates_that_differ(run: Run, oracle: Run, step: int, allowed: float) -> dict[str, float]:
    mine, theirs = changes(run, step), changes(oracle, step)
    zero = [0.0] * 5
    apart = {
        name: difference(mine.get(name, zero), b) / max(difference(b, [0.0] * len(b)), 1e-30)
        for name, b in theirs.items()
    }
    wrong = {name: value for name, value in apart.items() if not value <= allowed}
    return wrong or apart


def _factor(mine: Gradients, theirs: Gradients, names: list[str]) -> float | None:
    """The one number by which all these gradients differ from the oracle's; None if there is no such number."""
    ratios, straight = [], []
    for name in names:
        a, b = mine.get(name), theirs.get(name)
        if a is None or b is None or not (a[0] > 0.0 and b[0] > 0.0):
            return None
        ratio = math.sqrt(a[0] / b[0])
        ratios.append(ratio)
        straight.append(difference(a, [ratio * x for x in b]) <= 10 * EXACT * math.sqrt(a[0]))
    middle = sorted(ratios)[len(ratios) // 2]
    same = sum(s and abs(r / middle - 1.0) <= EXACT for s, r in zip(straight, ratios, strict=True))
    return middle if same >= 0.9 * len(ratios) else None


def meaning(parting: Parting, run: Run, label: str, other: str | None, oracle: Run | None = None) -> str:
    """What the pattern means. `other`: what the second oracle says, "agrees" or "differs", None if it cannot tell."""
    where = _where(parting)
    if parting.stage == "gradient" and parting.factor is not None:
        told = _of_factor(parting, run, label, oracle)
    elif parting.stage == "gradient":
        told = f"the gradients differ in direction from step 1 on{where}"
    elif parting.stage == "clip":
        by = f" (a factor of {parting.factor:.4g})" if parting.factor is not None else ""
        told = f"gradients agree after backward and differ in the optimizer{by}: clipping or other code between backward and step{where}"
    elif parting.stage == "optimizer":
        told = (
            f"gradients agree and the update does not: the optimizer's own arithmetic, its groups or its state{where}"
        )
    elif parting.stage == "later":
        told = (
            f"all agrees until step {parting.step}: what is carried from step to step "
            f"(gradients not cleared, optimizer state, learning rate){where}"
        )
    else:
        told = "the losses differ and no gradient does: the loss that is reported is not the one that is minimised"
    return told + _of_other(label, other)


def _where(parting: Parting) -> str:
    if not parting.parameters:
        return ""
    number, first = len(parting.parameters), parting.parameters[0]
    if number == parting.whole:
        return f"; every parameter, first {first}"
    inside = f"only parameters under {parting.module} differ" if parting.module else "not every parameter differs"
    return f"; {inside} ({number} of {parting.whole}), first {first}"


def _of_factor(parting: Parting, run: Run, label: str, oracle: Run | None) -> str:
    factor = parting.factor or 1.0
    what = words(readings(factor, run, oracle))
    number = len(parting.parameters)
    who = "every gradient" if number == parting.whole else f"the gradient of {number} of {parting.whole} parameters"
    told = f"{who} is {factor:.4g} x that of {label}" + (f", = {what}" if what else ": one factor on them all")
    return told if number == parting.whole else told + _where(parting)


def _of_other(label: str, other: str | None) -> str:
    if label == "DDP":
        return (
            "; one process differs too, so the fault is in the script's own sharded arithmetic"
            if other == "differs"
            else ""
        )
    return {
        "agrees": "; DDP agrees and one process does not: the fault is in how the loss is normalised over ranks, or in how "
        "the data are split",
        "differs": "; DDP differs too, so it is not the split of the data alone",
    }.get(other or "", "")
