"""Gradients: ranks scale them by one factor, the logged norm is that of all ranks, and none is used
twice.

In a step that is checked the gradients are looked at when the last backward has ended and when the
optimizer steps: what clips or unscales them in between multiplies all by one number, the same on
all ranks.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from ...probe.compat import tensors
from ...probe.compat.groups import Slot
from ..context import Context
from ..journal import Breach
from ..measured import Measured
from ..scene import contributes, largest
from . import Law, Posts

LOGGED = re.compile(r"(?:grad(?:ient)?[_ ]?)?norm\W{0,4}(?P<value>\d+\.\d+(?:[eE][-+]?\d+)?)")
APART = 0.01  # between factors of ranks: bfloat16 rounds by 0.4 %
SOME = 16  # parameters whose factors a rank leaves
OWN = 1e-3  # between a logged norm and that of a rank alone
TWICE = 2  # checks in a row after which it is a breach


class Gradients(Law):
    """Norms of gradients in steps that are checked."""

    name = "loss-and-norm"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._first = True  # whether no backward has ended since the last step
        self._stale: list[tuple[str, torch.Tensor]] = []
        self._after: list[tuple[str, torch.Tensor]] = []  # largest elements after a backward
        self._squares: torch.Tensor | None = None  # of the elements that count on this rank
        self._at_step: list[tuple[str, torch.Tensor]] = []
        self._by_value = False  # whether elements are clipped one by one
        self._logged: dict[int, float] = {}  # {step: norm}, since the last check
        self._norms = (0, 0.0, 0.0)  # of the last check: step, norm of all ranks, of rank 0 alone
        self._counted = {"factor": 0, "logged": 0, "stale": 0}  # checks in a row

    def install(self) -> None:
        around = self.context.dispatcher.around
        around("torch.nn.utils:clip_grad_value_", before=lambda call: self._clips_values())
        self.context.printed.append(self._read)

    def _clips_values(self) -> None:
        self._by_value = True

    def _read(self, text: str) -> None:
        if (found := LOGGED.search(text)) is not None:
            self._logged[self.context.step] = float(found["value"])

    def backward(self, losses: list[torch.Tensor]) -> None:
        # Of several optimizers one may leave the gradients of another, which clears them itself.
        if self.context.due and self._first and len(self.context.scene.optimizers()) == 1:
            self._stale = largest(_gradients(self.context.scene.slots()))

    def after_backward(self) -> None:
        self._first = False
        if self.context.due:
            slots = self.context.scene.slots()
            self._after = largest(_gradients(slots))
            self._squares = _squares(slots, self.context.rank)

    def stepping(self, optimizer: Optimizer, due: bool) -> None:
        # With a closure the backward comes later, inside the step.
        if due and not self._first:
            self._at_step = largest(_gradients(self.context.scene.slots()))

    def stepped(self, lead: bool) -> None:
        self._first = self._first or lead

    def measure(self, measured: Measured) -> None:
        # Training reads what is at the step, by name.
        every = (("stale", self._stale), ("after", self._after), ("gradient", self._at_step))
        for what, found in every:
            for name, value in found:
                measured.take(what, name, value)
        if self._squares is not None:
            measured.take("squares", "", self._squares)
        measured.values["logged norm"], self._logged = self._logged, {}
        self._stale, self._after, self._at_step, self._squares = [], [], [], None

    def local(self, measured: Measured) -> Iterable[Breach]:
        stale = [name for name, value in measured.numbers.get("stale", {}).items() if value]
        if measured.kind == "check" and self._again("stale", bool(stale)):
            yield self.breach(
                measured.step,
                f"{len(stale)} gradients of the last step are still there when the next one's first"
                f" backward begins, first {stale[0]}",
                ranks=[self.context.rank],
                names=stale,
                edit="clear gradients after each step",
                command="fsdp2 explain gradients-consumed-once",
                key="stale",
            )

    def post(self, measured: Measured) -> dict[str, Any]:
        after, at_step = (measured.numbers.get(what, {}) for what in ("after", "gradient"))
        both = [name for name in after if after[name] and name in at_step]
        # Of each parameter: a script may scale one unlike another, by what is known of it.
        some = [] if self._by_value else both[:: max(1, len(both) // SOME)]
        squares = measured.numbers.get("squares", {}).get("")
        return {"factors": {name: at_step[name] / after[name] for name in some}, "squares": squares}

    def judge(self, measured: Measured, posts: Posts) -> Iterable[Breach]:
        if measured.kind != "check":
            return
        squares = [post["squares"] for post in posts.values() if post.get("squares") is not None]
        total = math.sqrt(math.fsum(squares)) if squares else math.nan
        if squares and len(squares) == len(posts):
            measured.values.setdefault("curves", {})["norm"] = total
            yield from self._norm(measured, total, math.sqrt(posts[0]["squares"]))
        factors: dict[str, dict[int, float]] = defaultdict(dict)
        for rank, post in posts.items():
            for name, factor in post.get("factors", {}).items():
                factors[name][rank] = factor
        apart = [name for name, own in factors.items() if _apart([*own.values()])]
        if self._again("factor", bool(apart)):
            own = factors[apart[0]]
            low, high = min(own, key=own.__getitem__), max(own, key=own.__getitem__)
            yield self.breach(
                measured.step,
                f"ranks multiply the gradient of {apart[0]} by other numbers before a step:"
                f" {own[low]:.4g} on rank {low}, {own[high]:.4g} on rank {high}",
                ranks=sorted(own),
                names=apart,
                edit="clip by the norm of all shards: clip_grad_norm_ of DTensors, or squares that"
                " are reduced over the ranks",
                command="fsdp2 explain manual-local-norm-clip",
                key="factor",
            )

    def _norm(self, measured: Measured, total: float, own: float) -> Iterator[Breach]:
        """A logged norm that is that of rank 0's shards."""
        logged = measured.values["logged norm"]
        before, self._norms = self._norms, (measured.step, total, own)
        # Logged before the step that is checked now, or after the one that was checked last.
        known = ((logged.get(measured.step - 1), total, own), (logged.get(before[0]), *before[1:]))
        alone = [
            (value, of_all)
            for value, of_all, one in known
            if value and abs(value - one) < OWN * one and abs(value - of_all) > 10 * OWN * of_all
        ]
        if any(value for value, _, _ in known) and self._again("logged", bool(alone)):
            yield self.breach(
                measured.step,
                f"the gradient norm that is logged, {alone[0][0]:.4g}, is that of one rank's"
                f" shards; of all it is {alone[0][1]:.4g}",
                ranks=[0],
                edit="log what clip_grad_norm_ returns, with full_tensor()",
                command="fsdp2 explain grad-norm-item-partial",
                key="logged norm",
            )

    def _again(self, what: str, now: bool) -> bool:
        """Whether this is the check in a row that makes it a breach."""
        self._counted[what] = self._counted[what] + 1 if now else 0
        return self._counted[what] == TWICE


def _apart(factors: list[float]) -> bool:
    return max(factors) - min(factors) > APART * max(factors)


def _gradients(slots: list[Slot]) -> list[tuple[str, torch.Tensor]]:
    return [(slot.name, slot.param.grad) for slot in slots if slot.param.grad is not None]


def _squares(slots: list[Slot], rank: int) -> torch.Tensor | None:
    """The sum of squares of this rank's parts, each element of the model on one rank."""
    parts = [
        tensors.plain(tensors.local(grad))
        for slot in slots
        if (grad := slot.param.grad) is not None and contributes(grad, rank)
    ]
    parts = [part for part in parts if part.numel() and part.layout == torch.strided]
    if not parts:
        found = next((slot.param for slot in slots), None)
        return None if found is None else torch.zeros((), device=found.device)
    norms = torch._foreach_norm([part.float() for part in parts], 2)
    return torch.stack(norms).square().sum()
