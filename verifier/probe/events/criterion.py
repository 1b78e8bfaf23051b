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
        others = [one for one in session.batch.criteria if one is not seen]
        session.batch.criteria = [*others, replace(seen, gradient=float(gradient))]

    def computed(call: Call) -> None:
        named = {**dict(zip(_OPTIONS, call.args[2:], strict=False)), **call.kwargs}
        target, value = call.given(1, "target"), call.result
        # Soft targets and class weights have no number of targets by which the loss could be
        # weighed.
        if target.is_floating_point() or named.get("weight") is not None:
            return
        if torch.is_grad_enabled() and value.requires_grad:
            valid = int((target != named.get("ignore_index", -100)).sum())
            reduction = str(named.get("reduction", "mean"))
            seen = Criterion(
                reduction=reduction, valid=valid, gradient=None, targets=target.numel()
            )
            # what a checkpoint computes again counts only where its gradient is used
            if not session.progress.in_backward:
                session.batch.criteria.append(seen)
            if value.numel() == 1:
                # A target weighs as much as the gradient that arrives at it: another term in the
                # loss changes nothing (exam r6 t_09_clip_window, v_03_distill_tokens: a
                # distillation term beside the cross entropy).
                value.register_hook(partial(weigh, seen))

    session.dispatcher.outermost(
        [f"torch.nn.functional:{name}" for name in ("cross_entropy", "nll_loss")], computed
    )
