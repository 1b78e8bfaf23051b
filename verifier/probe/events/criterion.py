"""Cross entropies: how many targets count, and how they weigh in the loss."""

from dataclasses import replace
from functools import partial

import torch

from ...trace.events import Criterion
from ..dispatcher import Call
from ..session import Session

_OPTIONS = ("weight", "size_average", "ignore_index", "reduce", "reduction")


def install(session: Session) -> None:
    """Subscribe to cross entropy and negative log-likelihood, of which one calls the other."""

    def weigh(seen: Criterion, gradient: torch.Tensor) -> None:
        session.criteria = [replace(one, gradient=float(gradient)) if one is seen else one for one in session.criteria]

    def computed(call: Call) -> None:
        named = {**dict(zip(_OPTIONS, call.args[2:], strict=False)), **call.kwargs}
        target, value = call.given(1, "target"), call.result
        if target.is_floating_point() or named.get("weight") is not None:
            return
        if torch.is_grad_enabled() and value.requires_grad:
            valid = int((target != named.get("ignore_index", -100)).sum())
            seen = Criterion(reduction=str(named.get("reduction", "mean")), valid=valid, gradient=None)
            session.criteria.append(seen)
            if value.numel() == 1:
                value.register_hook(partial(weigh, seen))

    session.dispatcher.outermost([f"torch.nn.functional:{name}" for name in ("cross_entropy", "nll_loss")], computed)
