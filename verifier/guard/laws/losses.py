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
SAME = 1e-4  # between norms of ranks that are the same
TIMES = 2  # logged numbers in a row, each far from the mean and near its multiple
USUAL = 3  # windows after which a shorter one is seen to be shorter


class Losses(Law):
    """Losses of backwards, clipped norms, and numbers that the script logs as its loss."""

    name = "loss-and-norm"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._micro: list[torch.Tensor] = []  # losses of the micro-batches of this step
        # (step, sum of them, how many, by what they were divided)
        self._steps: list[tuple[int, torch.Tensor, int, float]] = []
        self._divisors: list[float] = []  # by which they were divided, in this step
        self._usual: Counter[tuple[int, float]] = Counter()
        self._uneven: list[tuple[int, int, float, str]] = []
        self._norm: tuple[int, torch.Tensor, float, str] | None = None  # of the last clip
        self._logged: list[tuple[int, float]] = []  # (step, number)
        self._divide: float | None = None  # by which FSDP divides gradients, None: the ranks
        # of rank 0
        self._apart = 0
        self._multiple: Counter[str] = Counter()

    def install(self) -> None:
        around = self.context.dispatcher.around
        around("torch.nn.utils:clip_grad_norm_", after=self._clipped)
        around("torch.nn.utils:clip_grads_with_norm_", before=self._clips, optional=True)
        around(f"torch.distributed.fsdp:{FSDPModule.__name__}.{DIVIDE}", before=self._divided)
        around("builtins:print", before=self._printed)
        around("logging:Logger.handle", before=self._handled)

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
        if (len({*divisors}) == 1 and count > 1) or divisors[0] > 1:
            self._weigh(step, count, divisors[0])

    def _weigh(self, step: int, count: int, divisor: float) -> None:
        """A window of fewer micro-batches whose losses are divided by the full number."""
        full, times = self._usual.most_common(1)[0] if self._usual else ((count, divisor), 0)
        self._usual[count, divisor] += 1
        if times >= USUAL and full == (round(divisor), divisor) and count < full[0]:
            self._uneven.append((step, count, divisor, self.context.here()))

    def measure(self, measured: Measured) -> None:
        steps, self._steps = self._steps, []
        if steps:
            sums = torch.stack([one.to(torch.float32) for _, one, _, _ in steps])
            measured.take_vector("losses", sums)
        norm, self._norm = self._norm, None
        measured.values["losses"] = {
            "steps": [(step, count, divisor) for step, _, count, divisor in steps],
            "logged": self._logged,
            "divide": self._divide,
            "norm": None if norm is None else (norm[0], norm[2], norm[3]),
        }
        if norm is not None:
            measured.take("norm", "", norm[1])
        self._logged = []

    def local(self, measured: Measured) -> Iterator[Breach]:
        uneven, self._uneven = self._uneven, []
        for step, count, divisor, place in uneven:
            yield self.breach(
                step,
                f"{count} micro-batches are divided by {divisor:g}: the samples of this step weigh"
                f" {count / divisor:.2g} of those of others",
                ranks=[self.context.rank],
                place=place,
                edit=f"divide the losses of a shorter window by its own number ({count})",
                command="fsdp2 explain gradient-of-mean-loss",
                key="window",
            )

    def post(self, measured: Measured) -> dict[str, Any]:
        if measured.kind != "check":
            return {}
        own = measured.values["losses"]
        sums = measured.vectors["losses"].tolist() if "losses" in measured.vectors else []
        norm = measured.numbers.get("norm", {}).get("")
        return {
            "steps": [[*one, value] for one, value in zip(own["steps"], sums, strict=True)],
            "norm": None if norm is None else [*own["norm"], norm],
        }

    def judge(self, measured: Measured, posts: Posts) -> Iterable[Breach]:
        if measured.kind != "check":
            return
        sums: dict[int, list[float]] = {}
        counts: dict[int, tuple[int, float]] = {}
        for post in posts.values():
            for step, count, divisor, value in post.get("steps", ()):
                sums.setdefault(step, []).append(value)
                counts[step] = count, divisor
        curves = measured.values.setdefault("curves", {})
        if sums:
            last = max(sums)
            curves["loss"] = _mean(sums[last])
        yield from self._norms(measured, posts)
        yield from self._multiples(measured, sums, counts)

    def _norms(self, measured: Measured, posts: Posts) -> Iterator[Breach]:
        """The norms by which ranks clipped in the same step."""
        norms = {rank: post["norm"] for rank, post in posts.items() if post.get("norm")}
        if not norms or len({one[0] for one in norms.values()}) > 1:
            return
        values = {rank: one[3] for rank, one in norms.items()}
        measured.values["curves"]["norm"] = values.get(0, _mean([*values.values()]))
        low, high = min(values.values()), max(values.values())
        clipped = any(value > norms[rank][1] for rank, value in values.items())
        differ = math.isfinite(high) and high - low > SAME * high and clipped
        self._apart = self._apart + 1 if differ else 0
        # One check may fall on a rank whose norm is its own for a reason of that step.
        if self._apart == 2:
            rank = max(values, key=lambda one: abs(values[one] - low))
            yield self.breach(
                measured.step,
                f"ranks clip by other norms: {low:.4g} to {high:.4g} in one step",
                ranks=sorted(values),
                place=str(norms[rank][2]),
                edit="take the norm of all shards: clip_grad_norm_ of DTensors, or the sum of"
                " squares reduced over the ranks",
                command="fsdp2 explain manual-local-norm-clip",
                key="norm",
            )

    def _multiples(
        self, measured: Measured, sums: dict[int, list[float]], counts: dict[int, tuple[int, float]]
    ) -> Iterator[Breach]:
        """A logged loss that is N times, or a part of, the loss that gradients are of."""
        world = self.context.world
        for step, value in measured.values["losses"]["logged"]:
            if step not in sums or len(sums[step]) != world:
                continue
            divide = measured.values["losses"]["divide"] or world
            count, divisor = counts[step]
            trained = math.fsum(sums[step]) / divide
            known = [trained, *sums[step]]
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

    def _clipped(self, call: Call) -> None:
        self._clip(call.result, float(call.given(1, "max_norm")))

    def _clips(self, call: Call) -> None:
        self._clip(call.given(2, "total_norm"), float(call.given(1, "max_norm")))

    def _clip(self, norm: object, most: float) -> None:
        # Of DTensors it is a sum that the ranks have still to make.
        if isinstance(norm, torch.Tensor) and not isinstance(norm, DTensor):
            self._norm = (self.context.step + 1, norm.detach().clone(), most, self.context.here())

    def _divided(self, call: Call) -> None:
        self._divide = float(call.given(1, "factor"))

    def _printed(self, call: Call) -> None:
        if call.args and self.context.rank == 0:
            # Tensors are left alone: to read one waits for its device.
            self._read(" ".join(str(one) for one in call.args if isinstance(one, str | float)))

    def _handled(self, call: Call) -> None:
        if self.context.rank == 0:
            self._read(call.args[1].getMessage())

    def _read(self, text: str) -> None:
        if len(text) < 2000 and (found := LOGGED.search(text)) is not None:
            self._logged.append((self.context.step, float(found["value"])))


def _divisor(loss: torch.Tensor) -> float:
    """By which number the script has divided a loss last; 1 if it has not."""
    made = loss.grad_fn
    kind = type(made).__name__
    other = (
        getattr(made, "_saved_other", None) if kind in ("DivBackward0", "MulBackward0") else None
    )
    if not isinstance(other, int | float) or other == 0:
        return 1.0
    return float(other) if kind == "DivBackward0" else 1.0 / float(other)


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)
