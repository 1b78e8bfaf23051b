"""Cross entropies: how many targets count, and the value."""

from __future__ import annotations

import torch

from ...trace.events import Criterion
from ..dispatcher import Call, Leave
from ..session import Session

_OPTIONS = ("weight", "size_average", "ignore_index", "reduce", "reduction")


def install(session: Session) -> None:
    """Subscribe to cross entropy and negative log-likelihood, of which one calls the other."""
    outermost: list[Call] = []

    def before(call: Call) -> Leave:
        outermost.append(call)
        return leave

    def leave() -> None:
        inner = outermost.pop()
        if not outermost and inner.failed is None:
            _computed(session, inner)

    for name in ("cross_entropy", "nll_loss"):
        session.dispatcher.around(f"torch.nn.functional:{name}", before=before)


def _computed(session: Session, call: Call) -> None:
    named = {**dict(zip(_OPTIONS, call.args[2:], strict=False)), **call.kwargs}
    target, value = call.given(1, "target"), call.result
    if target.is_floating_point() or named.get("weight") is not None:
        return
    if torch.is_grad_enabled() and value.requires_grad:
        session.criteria.append(
            Criterion(
                reduction=str(named.get("reduction", "mean")),
                valid=int((target != named.get("ignore_index", -100)).sum()),
                value=float(value.detach()) if value.numel() == 1 else None,
            )
        )
