"""The backwards of every optimizer step, in the survey run: how many, and how each is scaled."""

import weakref
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...trace.events import Accumulation, Place
from ..compat.operators import constant_applied
from ..compat.tensors import local
from ..dispatcher import Call, Leave
from ..session import Session
from .backward import BACKWARD

MOST = 1000  # that are recorded of a rank
GRADIENTS, ELEMENTS = 4, 1 << 12  # of an optimizer that are compared, and of each


class Accumulations:
    """The backwards since the last optimizer step, and a few of the gradients that they made."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.depth = 0  # of the backwards that are running
        self.scales: list[float | None] = []
        self.line: Place | None = None  # of the last backward
        self.parameters: list[weakref.ref[torch.Tensor]] = []
        self.made: list[torch.Tensor] = []  # gradients after the last backward
        self.clipped: list[torch.Tensor] = []  # and at the first clip since
        self.last: tuple[int, float | None] = (0, None)

    def backward(self, call: Call) -> Leave:
        """A backward is about to begin."""
        if self.depth == 0:
            self.scales.append(_scale(call))
            self.line = self.session.here()
        self.depth += 1
        return self._leave

    def _leave(self) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.made, self.clipped = self._gradients(), []

    def clipping(self, call: Call) -> None:
        """A clip is about to be made: what the script does before it is its own scale."""
        self.clipped = self.clipped or self._gradients()

    def stepping(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer is about to step; one may share the backwards of another."""
        if self.depth or not self.scales:
            return
        number, scales = len(self.scales), set(self.scales)
        scale = scales.pop() if len(scales) == 1 else None
        # Of equal steps in a row the first is enough, once there are gradients to compare.
        if (number, scale) != self.last and self.session.first(Accumulation, most=MOST):
            changed = _factor(self.made, self.clipped or self._gradients())
            self.session.write(
                Accumulation(batches=number, scale=scale, changed=changed, at_line=self.line)
            )
            self.last = (number, scale) if changed is not None else self.last
        self.scales, self.made, self.clipped = [], [], []
        if not self.parameters:
            own = (param for group in optimizer.param_groups for param in group["params"])
            used = [param for param in own if param.grad is not None]
            self.parameters = [weakref.ref(param) for param in used[:GRADIENTS]]

    def _gradients(self) -> list[torch.Tensor]:
        """Copies of a few gradients; none where one is missing."""
        grads = [param.grad for one in self.parameters if (param := one()) is not None]
        if not all(isinstance(grad, torch.Tensor) for grad in grads):
            return []
        return [local(g).reshape(-1)[:ELEMENTS].clone() for g in grads if g is not None]


def install(session: Session) -> None:
    """Watch the survey run, not one of which only the end counts."""
    if not session.request.leave_starting_point:
        return
    accumulations = Accumulations(session)
    session.around(BACKWARD, before=accumulations.backward)
    for name in ("clip_grad_norm_", "clip_grads_with_norm_", "clip_grad_value_"):
        session.around(f"torch.nn.utils:{name}", before=accumulations.clipping, optional=True)
    register_optimizer_step_pre_hook(session.guarded(accumulations.stepping))


def _scale(call: Call) -> float | None:
    """The constant by which the script multiplies what it calls backward with: 0.25 of `loss / 4`;
    None of several losses.
    """
    root = call.given(0, "tensors")
    root = root[0] if isinstance(root, list | tuple) and len(root) == 1 else root
    if not isinstance(root, torch.Tensor) or root.numel() != 1:
        return None
    given = call.given(1, "grad_tensors")
    given = given[0] if isinstance(given, list | tuple) and len(given) == 1 else given
    if given is not None and not isinstance(given, torch.Tensor):
        return None
    scale, node = 1.0 if given is None else float(local(given)), root.grad_fn
    while node is not None and (step := constant_applied(node)) is not None:
        factor, node = step
        scale *= factor
    return scale


def _factor(before: list[torch.Tensor], after: list[torch.Tensor]) -> float | None:
    """By what gradients were multiplied; None where that is not known."""
    if not before or [one.shape for one in before] != [one.shape for one in after]:
        return None
    pairs = [(a.double(), b.double()) for a, b in zip(before, after, strict=True)]
    own = sum(float(a @ a) for a, _ in pairs)
    return sum(float(a @ b) for a, b in pairs) / own if own > 0.0 else None
