"""Every parameter trains: held by an optimizer that moves it, finite, by the rate of its schedule.

All ranks post which parameters did not move or had no gradient, as bits in the order of names: a
shard may be still while others move, so a parameter is still only if it is on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Adam, AdamW, Optimizer

from ...probe.events.schedules import Schedules
from ...trace.recorded import unused
from ..context import Context
from ..journal import Breach
from ..measured import Measured
from ..scene import largest
from . import Law, Posts

# Checks in a row after which a parameter that does not train is a breach: of an expert or a branch
# that a few batches leave out, one check may see no gradient.
STILL = 2
SLACK = 1.05  # of the range of an update: rounding of low precisions


@dataclass
class Window:
    """What one rank saw of the parameters up to a check, each as bits in the order of names."""

    trainable: int = 0
    held: int = 0  # by an optimizer whose learning rate is not 0
    gradient: int = 0  # not zero, in the step that is checked
    moved: int = 0  # since the last check


class Training(Law):
    """Gradients and movement of each parameter, and schedules that move what steps."""

    name = "every-parameter-trains"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.schedules = Schedules(context.frames.here)
        self._names: list[str] = []
        self._held: set[str] = set()
        self._largest: dict[str, float] = {}  # elements of weights at the last check
        self._before: dict[str, float] = {}  # sketches at the last check
        self._count: dict[tuple[str, str], int] = {}
        # how far the steps since the last check may have moved an element: so much, and so many
        # times itself
        self._reach = [0.0, 0.0]
        self._loads = 0
        # {schedule: (checks that agreed, its epoch then, checks since that did not)}
        self._rates: dict[int, tuple[int, int, int]] = {}
        self._other_rates: list[tuple[list[float], list[float]]] = []

    def install(self) -> None:
        self.schedules.watch(self.context.dispatcher, self.context.guarded)

    def stepping(self, optimizer: Optimizer, due: bool) -> None:
        reach = [_reach(optimizer, group) for group in optimizer.param_groups]
        for part in (0, 1):
            self._reach[part] += max((one[part] for one in reach), default=0.0)
        if not due:
            return
        self._overwritten()
        slots = self.context.scene.slots()
        self._names = [slot.name for slot in slots]
        rates = {
            id(param): group.get("lr", 1.0)
            for one in self.context.scene.optimizers()
            for group in one.param_groups
            for param in group["params"]
        }
        self._held = {s.name for s in slots if _positive(rates.get(id(s.param), 0.0))}

    def measure(self, measured: Measured) -> None:
        slots = self.context.scene.slots()
        for name, value in largest([(s.name, s.param) for s in slots]):
            measured.take("largest", name, value)
        measured.values["training"] = {
            "names": self._names,
            "trainable": _bits(self._names, {s.name for s in slots if s.param.requires_grad}),
            "held": _bits(self._names, self._held),
            "reach": self._reach if self._loads == self.context.loads else [math.inf, 0.0],
        }
        self._loads = self.context.loads
        self._reach = [0.0, 0.0]

    def local(self, measured: Measured) -> Iterable[Breach]:
        if measured.kind != "check":
            return
        largest = measured.numbers.get("largest", {})
        reach = measured.values["training"]["reach"]
        bad = [name for name, value in largest.items() if not math.isfinite(value)]
        if bad:
            yield self._of_names(measured, bad, "not finite", "holds values that are not finite")
        for name, value in largest.items():
            before = self._largest.get(name, 0.0)
            # decay takes a part of the element itself
            most = (reach[0] + reach[1] * abs(before)) * SLACK + 1e-3 * abs(before)
            if name in self._largest and abs(value - before) > most:
                text = (
                    f"the largest element of {name} is {value:.4g} and was {before:.4g} at the last"
                    f" check; the optimizer's steps in between reach {most:.3g}"
                )
                yield self._of_names(measured, [name], "range", text, whole=True)
        self._largest = dict(largest)
        yield from self._schedule(measured)

    def post(self, measured: Measured) -> dict[str, Any]:
        if measured.kind != "check":
            return {}
        bits = measured.numbers.get("bits", {})
        weights = {n.removeprefix("weights/"): v for n, v in bits.items() if n[:8] == "weights/"}
        before, self._before = self._before, weights
        own = measured.values["training"]
        gradient = {n for n, v in measured.numbers.get("gradient", {}).items() if v != 0}
        moved = {n for n in own["names"] if n not in before or before[n] != weights.get(n)}
        return {
            "trainable": hex(own["trainable"]),
            "held": hex(own["held"]),
            "gradient": hex(_bits(own["names"], gradient)),
            "moved": hex(_bits(own["names"], moved)),
        }

    def judge(self, measured: Measured, posts: Posts) -> Iterable[Breach]:
        if measured.kind != "check":
            return
        seen = [
            Window(**{k: int(v, 16) for k, v in post.items()}) for post in posts.values() if post
        ]
        names = measured.values["training"]["names"]
        for bit, name in enumerate(names):
            mask = 1 << bit
            trainable, held, gradient, moved = (
                any(getattr(window, what) & mask for window in seen)
                for what in ("trainable", "held", "gradient", "moved")
            )
            still = trainable and not moved
            self._counted("unheld", name, still and gradient and not held)
            self._counted("unmoved", name, still and gradient and held)
            had = self._count.get(("had", name), 0) >= STILL
            self._counted("lost", name, trainable and held and not gradient and had)
            if gradient:
                self._count["had", name] = self._count.get(("had", name), 0) + 1
        yield from self._still(measured, names)

    def _counted(self, what: str, name: str, now: bool) -> None:
        self._count[what, name] = self._count.get((what, name), 0) + 1 if now else 0

    def _still(self, measured: Measured, names: list[str]) -> Iterator[Breach]:
        words = {
            "unheld": "has a gradient and is in no optimizer",
            "unmoved": "has a gradient and is in an optimizer, and no step has changed it",
            "lost": "has no gradient any more",
        }
        edits = {
            "unheld": "build the optimizer from the parameters that the model has after sharding",
            "unmoved": "look whether the update is smaller than the dtype resolves, or is undone",
            "lost": "",
        }
        for what, text in words.items():
            found = [name for name in names if self._count.get((what, name), 0) == STILL]
            if found:
                yield self._of_names(measured, found, what, text, edits[what])

    def _overwritten(self) -> None:
        """Schedules whose optimizer uses another rate than they set last, where it used theirs."""
        for number, (rates, used, epoch) in enumerate(self.context.scene.rates()):
            agreed, before, differed = self._rates.get(number, (0, -1, 0))
            if rates == used:
                agreed, differed = agreed + 1, 0
            elif agreed >= STILL and epoch > before:  # one that is stepped no more was replaced
                differed += 1
            self._rates[number] = agreed, epoch, differed
            if differed == STILL:
                self._other_rates.append((rates, used))

    def _schedule(self, measured: Measured) -> Iterator[Breach]:
        other, self._other_rates = self._other_rates, []
        for rates, used in other:
            yield self.breach(
                measured.step,
                f"the schedule sets the learning rate to {_rates(rates)}, and the optimizer steps"
                f" with {_rates(used)}",
                ranks=[self.context.rank],
                edit="find what writes param_groups after the schedule",
                key="overwritten",
            )
        for one in (record for record in self.schedules.records() if unused(record)):
            kind = one.cls.rpartition(".")[2]
            yield self.breach(
                measured.step,
                f"{kind} sets the learning rate of an optimizer that steps no more"
                f" ({_rates(one.lr)}); the one that steps uses {_rates(one.lr_of_others)}",
                ranks=[self.context.rank],
                place=f"{one.at_line.file}:{one.at_line.line}" if one.at_line else "",
                edit="build the schedule again with the new optimizer",
                command="fsdp2 explain schedule-of-replaced-optimizer",
                key=kind,
            )

    def _of_names(
        self,
        measured: Measured,
        names: list[str],
        key: str,
        text: str,
        edit: str = "",
        whole: bool = False,
    ) -> Breach:
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        checks = 1 if key in ("not finite", "range") else STILL
        return self.breach(
            measured.step,
            text if whole else f"{names[0]}{more} {text}",
            ranks=[self.context.rank],
            names=names,
            since=max(0, measured.step - self.context.settings.every * checks),
            edit=edit,
            key=f"{key} {names[0]}",
        )


def _reach(optimizer: Optimizer, group: dict[str, Any]) -> tuple[float, float]:
    """How far one step may move an element: of Adam at most lr (1 - b1) / sqrt(1 - b2), or lr
    (Kingma and Ba, 2015, section 2.1), and by decay lr times wd of itself; of others it is not
    known.
    """
    if type(optimizer) not in (Adam, AdamW) or not isinstance(group.get("lr"), float):
        return math.inf, 0.0
    first, second = (float(beta) for beta in group["betas"])
    factor = (1 - first) / math.sqrt(1 - second) if second < 1 else 1.0
    rate = float(group["lr"])
    return rate * max(1.0, factor), rate * float(group.get("weight_decay", 0.0))


def _positive(rate: Any) -> bool:
    """Whether a learning rate is more than 0; of one on a device that is not known."""
    return isinstance(rate, torch.Tensor) or rate > 0


def _bits(names: list[str], those: set[str]) -> int:
    return sum(1 << bit for bit, name in enumerate(names) if name in those)


def _rates(values: list[float]) -> str:
    return ", ".join(dict.fromkeys(f"{value:.4g}" for value in values))
