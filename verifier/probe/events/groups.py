"""FSDP's groups in training: reductions that lack a gradient, groups that stay unsharded, outputs that are changed in place."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...trace.events import AllReduce, InplaceView, Partial, Place, Reduce, Stale
from ..compat import groups, tensors
from ..compat.names import POST_BACKWARD, PRE_BACKWARD_HOOK, TO_SHARDED
from ..dispatcher import Call
from ..measures import class_name
from ..session import Session

_REDUCTIONS = 256  # reductions that lack a gradient which are recorded
_FLAGS = 32
_VIEWS = 4096


class Groups:
    """What is remembered of groups between two events of one rank."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.stale: weakref.WeakSet[Any] = weakref.WeakSet()
        self.evaluated: Place | None = None
        self.reductions = 0
        self.views: list[tuple[weakref.ref[torch.Tensor], int, str, Place | None]] = []
        self.flags = 0

    def called(self, module: nn.Module, given: Callable[[], list[torch.Tensor]]) -> None:
        """A root is called: any group that an optimizer step has left behind is used with the old weights now."""
        if self.session.in_backward:  # recomputed: no root is called
            return
        if not torch.is_grad_enabled():
            self.evaluated = self.session.here()
        found = tensors.groups(module)
        behind = [name for name, group in found if group in self.stale and group.is_unsharded]
        for _, group in found:
            self.stale.discard(group)
        if behind:
            self.session.write(
                Stale(
                    groups=behind,
                    after_step=self.session.step_number() - 1,
                    evaluated=self.evaluated,
                    at_line=self.session.here(),
                )
            )

    def stepping(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """An optimizer is about to step: which groups are unsharded, and which hold a gradient that was not all-reduced."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        partial = []
        for root, module in self.session.roots:
            for name, group in tensors.groups(module):
                if group.is_unsharded and any(_moves(p.sharded_param, held) for p in group.fsdp_params):
                    self.stale.add(group)
                if groups.not_all_reduced(group):
                    partial.append(root + name)
        if partial:
            self.session.write(Partial(groups=partial, step=self.session.step_number()))

    def reducing(self, call: Call) -> None:
        """A group is about to reduce its gradients; recorded if a parameter of it brings none."""
        group = call.args[0]
        if not group.reduce_grads or self.reductions >= _REDUCTIONS:
            return
        with torch.no_grad():
            missing = groups.without_gradient(group)
        if not missing:
            return
        self.reductions += 1
        self.session.write(
            Reduce(
                group=groups.name_of(group),
                step=self.session.step_number(),
                micro=self.session.micro,
                missing=missing,
                filled=groups.fills_unused(group),
                ranks=groups.ranks_of(group),
                at_line=self.session.here(),
            )
        )

    def resharded(self, call: Call) -> None:
        """A group goes back to its shards."""
        self.stale.discard(call.args[0])

    def flagged(self, call: Call) -> None:
        """`set_requires_all_reduce` is called; the first calls are recorded."""
        self.flags += 1
        if self.flags <= _FLAGS:
            value = bool(call.given(1, "requires_all_reduce"))
            self.session.write(AllReduce(value=value, at_line=self.session.here()))

    def returned(self, call: Call) -> None:
        """A wrapped module returns; outputs that are views are remembered with their version."""
        if not torch.is_grad_enabled():
            return
        state, output = call.args
        for tensor in tensors.tensors(output):
            if tensors.is_view(tensor) and len(self.views) < _VIEWS:
                names = (class_name(m).rpartition(".")[2].removeprefix("FSDP") for m in groups.modules_of(state))
                line = self.session.here()
                self.views.append((weakref.ref(tensor), tensors.version(tensor), ", ".join(names), line))

    def backward_begins(self) -> None:
        """Views that were changed in place since their module returned them."""
        changed = [(cls, line) for ref, version, cls, line in self.views if _changed(ref(), version)]
        self.views.clear()
        for cls, line in changed[:4]:
            self.session.write(InplaceView(module=cls, at_line=line))


def install(session: Session) -> None:
    """Subscribe; where DDP stands in there are no groups."""
    if session.stand_in:
        return
    watch = Groups(session)
    around = session.dispatcher.around
    around("torch.distributed.fsdp:FSDPModule.set_requires_all_reduce", before=watch.flagged)
    around(POST_BACKWARD, before=watch.reducing)
    around(TO_SHARDED, before=watch.resharded)
    around(PRE_BACKWARD_HOOK, before=watch.returned)
    session.subscribe("call", watch.called)
    session.subscribe("stepping", watch.stepping)
    session.subscribe("before backward", watch.backward_begins)


def _moves(param: torch.Tensor, held: set[int]) -> bool:
    return id(param) in held and param.grad is not None


def _changed(tensor: torch.Tensor | None, version: int) -> bool:
    return tensor is not None and tensors.version(tensor) != version
