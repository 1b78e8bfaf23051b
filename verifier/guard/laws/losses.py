"""Loss and norm: what is logged is the mean of what was trained on, gradient norms are the same on
all ranks, micro-batches weigh alike.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ...probe.compat.cuda import without_modes
from ...probe.dispatcher import Call
from ...probe.events.sharding import DIVIDE
from ..context import Context
from ..journal import Breach
from ..measured import Measured
from . import Law, Posts

# A logged number of this name; what stands between name and number is no other number or name.
LOGGED = re.compile(
    r"(?<![A-Za-z_/.])(?:train(?:ing)?[_/ ]?)?loss\W{0,4}"
    r"(?P<value>-?\d+\.\d+(?:[eE][-+]?\d+)?)"
)
NEAR = 0.03  # of a multiple, of the loss that was trained on: what smoothing and rounding change
APART = 0.25  # from it: below, a logged loss is its mean, or of a rank alone
TIMES = 2  # logged numbers in a row, each far from the mean and near its multiple
SAME = 1e-3  # between a logged number and what it is
USUAL = 3  # windows after which another one is seen to be another


class Losses(Law):
    """Losses of backwards, clipped norms, and numbers that the script logs as its loss."""

    name = "loss-and-norm"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._micro: list[torch.Tensor] = []  # losses of the micro-batches of this step
        # (step, sum of them, how many, by what they were divided)
        self._steps: list[tuple[int, torch.Tensor, int, float]] = []
        self._divisors: list[float] = []  # by which they were divided, in this step
        self._even: Counter[int] = Counter()  # windows divided by their own number
        self._uneven: list[tuple[int, list[float], int, str]] = []
        self._logged: list[tuple[int, float]] = []  # (step, number)
        self._divide: float | None = None  # by which FSDP divides gradients, None: the ranks
        # of rank 0
        self._multiple: Counter[str] = Counter()
        self._means = self._alone = 0  # logged numbers that are the mean; since then, of rank 0
        # of the last step of a check, whose loss may be logged after it
        self._last: dict[int, tuple[list[float], int, float]] = {}

    def install(self) -> None:
        around = self.context.dispatcher.around
        around(f"torch.distributed.fsdp:{FSDPModule.__name__}.{DIVIDE}", before=self._divided)
        self.context.printed.append(self._read)

    def backward(self, losses: list[torch.Tensor]) -> None:
        if len(losses) != 1 or losses[0].numel() != 1:
            return
        loss = losses[0]
        self._divisors.append(_divisor(loss))
        loss = loss._local_tensor if isinstance(loss, DTensor) else loss
        self._micro.append(loss.detach().reshape(()).clone())

    def stepped(self, lead: bool) -> None:
        micro, divisors = self._micro, self._divisors
        if not lead or not micro:
            return
        self._micro, self._divisors = [], []
        step, count = self.context.step, len(micro)
        self._steps.append((step, torch.stack(micro).sum(), count, divisors[0]))
        self._weigh(step, divisors)

    def _weigh(self, step: int, divisors: list[float]) -> None:
        """A window whose losses are not divided by its number of micro-batches, where those before
        it were.
        """
        even = all(one == len(divisors) for one in divisors)
        if even:
            self._even[len(divisors)] += 1
        usual, times = self._even.most_common(1)[0] if self._even else (1, 0)
        # A factor of another kind, such as a weight of the loss, is not the number of the window.
        if not even and usual > 1 and times >= USUAL and len(divisors) <= usual:
            self._uneven.append((step, divisors, usual, self.context.here()))

    def measure(self, measured: Measured) -> None:
        steps, self._steps = self._steps, []
        if steps:
            sums = torch.stack([one.to(torch.float32) for _, one, _, _ in steps])
            measured.take_vector("losses", sums)
        measured.values["losses"] = {
            "steps": [(step, count, divisor) for step, _, count, divisor in steps],
            "logged": self._logged,
            "divide": self._divide,
        }
        self._logged = []

    def local(self, measured: Measured) -> Iterator[Breach]:
        uneven, self._uneven = self._uneven, []
        for step, divisors, usual, place in uneven:
            by = ", ".join(dict.fromkeys(f"{one:g}" for one in divisors))
            yield self.breach(
                step,
                f"{len(divisors)} micro-batches are divided by {by}, and windows of {usual} before"
                f" by {usual}: samples weigh {len(divisors) / max(divisors):.2g} to"
                f" {len(divisors) / min(divisors):.2g} times as much as theirs",
                ranks=[self.context.rank],
                place=place,
                edit=f"divide each loss of a window by its number ({len(divisors)})",
                command="fsdp2 explain gradient-of-mean-loss",
                key="window",
            )

    def post(self, measured: Measured) -> dict[str, Any]:
        if measured.kind != "check":
            return {}
        own = measured.values["losses"]
        sums = measured.vectors["losses"].tolist() if "losses" in measured.vectors else []
        return {
            "steps": [[*one, value] for one, value in zip(own["steps"], sums, strict=True)],
        }

    def judge(self, measured: Measured, posts: Posts) -> Iterable[Breach]:
        if measured.kind != "check":
            return
        steps = self._last
        for _, post in sorted(posts.items()):
            for step, count, divisor, value in post.get("steps", ()):
                steps.setdefault(step, ([], count, divisor))[0].append(value)
        last = max(steps, default=0)
        curves = measured.values.setdefault("curves", {})
        # The first step may hold the loss of a trial step, whose gradients were cleared.
        if last and measured.step != self.context.first_check:
            curves["loss"] = _mean(steps[last][0])
        yield from self._multiples(measured, steps)
        self._last = {last: steps[last]} if last else {}

    def _multiples(
        self, measured: Measured, steps: dict[int, tuple[list[float], int, float]]
    ) -> Iterator[Breach]:
        """A logged loss that is N times, or a part of, the loss that gradients are of."""
        world = self.context.world
        for step, value in measured.values["losses"]["logged"]:
            sums, count, divisor = steps.get(step, ([], 1, 1.0))
            if len(sums) != world:
                continue
            divide = measured.values["losses"]["divide"] or world
            trained = math.fsum(sums) / divide
            yield from self._of_one_rank(step, value, trained, sums[0])
            known = [trained, sums[0]]  # rank 0 logs
            if divisor != count:  # of a window that is not divided: also the mean of its losses
                known += [one / count for one in known]
            known = [one for one in known if abs(one) > 1e-6]
            if not known or any(abs(value / one - 1) < APART for one in known):
                self._multiple.clear()
                continue
            factors: dict[str, float] = {
                f"{factor:g} times": factor
                for factor in (world, count, world * count)
                if factor > 1
            }
            factors |= {f"1/{factor:g} of": 1 / factor for factor in [*factors.values()]}
            fits = [w for w, f in factors.items() if abs(value / (trained * f) - 1) < NEAR]
            for words in {*self._multiple} - {*fits}:
                del self._multiple[words]
            for words in fits:
                self._multiple[words] += 1
                if self._multiple[words] == TIMES:
                    yield self.breach(
                        step,
                        f"the loss that is logged is {words} the mean of what was trained on"
                        f" ({value:.4g}, and {trained:.4g} over all ranks; {TIMES} times in a row)",
                        ranks=[0],
                        edit="divide what is reduced over the ranks once by their number",
                        command="",
                        key="logged",
                    )

    def _of_one_rank(self, step: int, value: float, trained: float, own: float) -> Iterator[Breach]:
        """A logged loss that was the mean over the ranks, and is that of rank 0 now."""
        if abs(trained - own) < 10 * SAME * abs(own):
            return
        is_own = abs(value - own) < SAME * abs(own)
        self._means += abs(value - trained) < SAME * abs(trained)
        self._alone = self._alone + 1 if is_own and self._means >= USUAL else 0
        if self._alone == TIMES:
            yield self.breach(
                step,
                f"the loss that is logged was the mean over the ranks, and is that of rank 0 now"
                f" ({own:.4g}; the mean is {trained:.4g})",
                ranks=[0],
                edit="reduce the loss over the ranks before it is logged",
                command="",
                key="of one rank",
            )

    def _divided(self, call: Call) -> None:
        self._divide = float(call.given(1, "factor"))

    def _read(self, text: str) -> None:
        if (found := LOGGED.search(text)) is not None:
            self._logged.append((self.context.step, float(found["value"])))


def _divisor(loss: torch.Tensor) -> float:
    """By which number the script has divided a loss last; 1 if it has not."""
    made = loss.grad_fn
    kind = type(made).__name__
    other = (
        getattr(made, "_saved_other", None) if kind in ("DivBackward0", "MulBackward0") else None
    )
    # A number of Python is kept as a tensor on the CPU; one of a device would be waited for.
    if not isinstance(other, torch.Tensor) or other.dim() or other.device.type != "cpu":
        return 1.0
    with without_modes():  # one that counts operations would be given the number itself
        value = float(other)
    if not value:
        return 1.0
    return value if kind == "DivBackward0" else 1.0 / value


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)
