"""FSDP's groups in training: reductions without a gradient, groups that stay unsharded, outputs
changed in place.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...launch.request import ONE_PROCESS
from ...trace.events import AllReduce, InplaceView, Partial, Place, Reduce, Stale
from ..compat import groups, tensors
from ..compat.names import POST_BACKWARD, PRE_BACKWARD_HOOK, TO_SHARDED
from ..dispatcher import Call
from ..measures import short_name
from ..session import Session
from .sharding import FLAGS

_REDUCTIONS = 256  # reductions without a gradient that are recorded
_VIEWS = 4096


class Groups:
    """What is kept of groups between two events of one rank."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.stale: weakref.WeakSet[Any] = weakref.WeakSet()
        self.evaluated: Place | None = None
        self.views: list[tuple[weakref.ref[torch.Tensor], int, str, Place | None]] = []

    def called(self, module: nn.Module, given: Callable[[], list[torch.Tensor]]) -> None:
        """A root is called: a group that is still unsharded is used with the weights that were
        gathered then.
        """
        # Activation checkpointing calls modules again in a backward: no new use of the gathered
        # weights.
        if self.session.progress.in_backward:  # recomputed: no root is called
            return
        if not torch.is_grad_enabled():
            self.evaluated = self.session.here()
        found = groups.groups(module)
        behind = [name for name, group in found if group in self.stale and group.is_unsharded]
        stepped = bool(behind)
        if (
            # In a simulated run nothing is really gathered: gathered weights cannot be compared
            # with their shards.
            not stepped and self.session.request.mode not in ONE_PROCESS
        ):  # where nothing is really gathered
            with torch.no_grad():
                behind = [name for name, group in found if groups.out_of_date(group)]
        self.stale.difference_update([group for _, group in found])
        if behind:
            step, line = self.session.progress.step_number() - 1, self.evaluated
            self.session.write(
                Stale(
                    groups=behind,
                    after_step=step,
                    stepped=stepped,
                    evaluated=line,
                    at_line=self.session.here(),
                )
            )

    def stepping(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """An optimizer is about to step: which groups are unsharded, and which hold a gradient that
        was not all-reduced.
        """
        held = {
            id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        }
        partial = []
        for root, module in self.session.roots:
            for name, group in groups.groups(module):
                if group.is_unsharded and any(
                    id(p.sharded_param) in held for p in group.fsdp_params
                ):
                    self.stale.add(group)
                if groups.not_all_reduced(group):
                    partial.append(root + name)
        if partial:
            self.session.write(Partial(groups=partial, step=self.session.progress.step_number()))

    def reducing(self, call: Call) -> None:
        """A group is about to reduce its gradients; recorded if a parameter of it has none."""
        group = call.args[0]
        if not group.reduce_grads:
            return
        with torch.no_grad():
            missing = groups.without_gradient(group)
        if missing and self.session.first("reduction", _REDUCTIONS):
            step, micro, here = (
                self.session.progress.step_number(),
                self.session.progress.micro,
                self.session.here(),
            )
            self.session.write(
                Reduce(
                    step=step, micro=micro, missing=missing, at_line=here, **groups.reduction(group)
                )
            )

    def flagged(self, call: Call) -> None:
        """`set_requires_all_reduce` is called; the first calls are recorded."""
        if self.session.first("all-reduce", FLAGS):
            value = bool(call.given(1, "requires_all_reduce"))
            self.session.write(AllReduce(value=value, at_line=self.session.here()))

    def returned(self, call: Call) -> None:
        """A wrapped module returns; outputs that are views are kept with their version."""
        state, output = call.args
        for tensor in tensors.tensors(output) if torch.is_grad_enabled() else ():
            if tensors.is_view(tensor) and len(self.views) < _VIEWS:
                names = ", ".join(short_name(module) for module in groups.modules_of(state))
                self.views.append(
                    (weakref.ref(tensor), tensors.version(tensor), names, self.session.here())
                )

    def backward_begins(self) -> None:
        """Views that were changed in place since their module returned them."""
        views, self.views = self.views, []
        changed = [
            v for v in views if (tensor := v[0]()) is not None and tensors.version(tensor) != v[1]
        ]
        for _, _, module, line in changed[:4]:
            self.session.write(InplaceView(module=module, at_line=line))


def install(session: Session) -> None:
    """Subscribe, except in a DDP run, which has no groups."""
    if session.request.mode == "ddp":
        return
    watch = Groups(session)
    session.around(
        "torch.distributed.fsdp:FSDPModule.set_requires_all_reduce", before=watch.flagged
    )
    session.around(POST_BACKWARD, before=watch.reducing)
    session.around(TO_SHARDED, before=lambda call: watch.stale.discard(call.args[0]))
    session.around(PRE_BACKWARD_HOOK, before=watch.returned)
    session.subscribe("call", watch.called)
    session.subscribe("stepping", watch.stepping)
    session.subscribe("before backward", watch.backward_begins)
