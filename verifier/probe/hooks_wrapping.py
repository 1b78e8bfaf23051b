"""What the probe hears of groups: what is wrapped on which mesh, ties, late parameters, reductions, unsharded groups.

It adds to the session's own `on_shard`, `adopt`, `on_call` and `on_step`, and changes nothing of what they do.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict as dsd
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..origin import within_torch
from . import grouplib, torchlib
from .guard import record_error
from .measures import class_name, shard_digest
from .session import Session

_REDUCTIONS = 256  # reductions that lack a gradient which are recorded
_FLAGS = 32
_VIEWS = 4096
_MARK = "_seen_by_fully_shard"
_JOINED = 256


def _quiet(heard: Callable[..., None]) -> Callable[..., None]:
    """`heard`, whose own errors are recorded and do not reach the script."""

    @functools.wraps(heard)
    def tried(self: Listener, *args: Any) -> None:
        try:
            with torch.no_grad():
                heard(self, *args)
        except Exception as error:
            record_error(self.session.recorder, heard.__name__, error)

    return tried


class Listener:
    """What is remembered between two events of one rank."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.owners: dict[
            int, list[tuple[Any, str, Any]]
        ] = {}  # mark -> [(module, name, line)] at the time of sharding
        self.sharded: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()
        self.known: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
        self.ties: list[list[tuple[Any, str, Any]]] = []
        self.stale: weakref.WeakSet[Any] = weakref.WeakSet()
        self.evaluated: Any = None
        self.reductions = 0
        self.views: list[tuple[Any, int, Any, Any]] = []
        self.flags = 0
        self.foreign = False

    # -- wrapping -----------------------------------------------------------------------------------------------------

    @_quiet
    def wrapped(self, modules: list[nn.Module], options: dict[str, Any]) -> None:
        """`fully_shard` is about to be applied."""
        line = self.session.recorder.here()
        mesh = torchlib.data_mesh(options)
        self.session.recorder.write(
            "wrap",
            modules=[class_name(module) for module in modules],
            mesh=grouplib.mesh_of(mesh),
            explicit_dims=options.get("dp_mesh_dims") is not None,
            at_line=line,
        )
        ignored = {id(p) for p in options.get("ignored_params") or ()}
        for module in modules:
            managed = grouplib.managed(module)
            self.sharded[module] = {"line": line}
            for owner in module.modules():
                self.known.setdefault(owner, set()).update(owner._parameters)
                for name, param in owner._parameters.items():
                    if param is None or id(param) in ignored or (id(owner), name) in managed:
                        continue
                    self.owners.setdefault(self._mark(param), []).append((weakref.ref(owner), name, line))
        self._find_ties()

    def _mark(self, param: torch.Tensor) -> int:
        """A number that this object alone has: ids come back, and a weak reference would forbid `swap_tensors`."""
        mark: int | None = getattr(param, _MARK, None)
        if mark is None:
            mark = len(self.owners) + 1
            setattr(param, _MARK, mark)
        return mark

    def _find_ties(self) -> None:
        for owners in self.owners.values():
            places = {(id(ref()), name): (ref, name, line) for ref, name, line in owners if ref() is not None}
            if len(places) > 1 and not any(_places(tie) == set(places) for tie in self.ties):
                self.ties = [tie for tie in self.ties if not _places(tie) < set(places)]
                self.ties.append(list(places.values()))

    @_quiet
    def adopted(self, root: nn.Module) -> None:
        """A root is called for the first time: what of it was tied, and what came after it was sharded."""
        names = {id(module): name for name, module in root.named_modules()}
        told: list[dict[str, Any]] = []
        for tie in self.ties:
            slots = [(module, name, line) for ref, name, line in tie if id(module := ref()) in names]
            if len(slots) > 1:
                told.append(
                    {
                        "names": [f"{names[id(m)]}.{name}".lstrip(".") for m, name, _ in slots],
                        "parameters": len({id(m._parameters.get(name)) for m, name, _ in slots}),
                        "line": slots[-1][2],
                    }
                )
        if told and isinstance(root, FSDPModule):
            self.session.recorder.write("ties", ties=told, at_line=self.session.recorder.here())
        self._late(root)
        if not self.session.stand_in:
            own = next((name for name, model in self.session.roots if model is root), "")
            shards = {own + slot.name: shard_digest(torchlib.local(slot.param)) for slot in torchlib.slots(root)}
            self.session.recorder.write("shards", digests=shards)

    def _late(self, root: nn.Module) -> None:
        top = next(
            (module for module in root.modules() if module in self.sharded), None
        )  # an adapter's model is above it
        if top is None:
            return
        managed, below = grouplib.managed(root), {id(module) for module in top.modules()}
        own = next((name for name, model in self.session.roots if model is root), "")
        late = [
            own + f"{prefix}.{name}".lstrip(".")
            for prefix, module in root.named_modules()
            for name, param in module._parameters.items()
            if param is not None
            and id(module) in below
            and (id(module), name) not in managed
            and name not in self.known.get(module, ())
            and not torchlib.layout(param, 0)["sharded"]
        ]
        if late:
            self.session.recorder.write("late", names=late, at_line=self.sharded[top]["line"])

    # -- groups that stay unsharded -----------------------------------------------------------------------------------

    @_quiet
    def called(self, module: nn.Module, evaluating: bool) -> None:
        """A root is called: any group that an optimizer step has left behind is used with the old weights now."""
        if evaluating:
            self.evaluated = self.session.recorder.here()
        behind = [name for name, group in torchlib.groups(module) if group in self.stale and group.is_unsharded]
        for _, group in torchlib.groups(module):
            self.stale.discard(group)
        if behind:
            self.session.recorder.write(
                "stale",
                groups=behind,
                after_step=self.session.step_number() - 1,
                evaluated=self.evaluated,
                at_line=self.session.recorder.here(),
            )

    @_quiet
    def stepping(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step: which groups are unsharded, and which hold a gradient that was not all-reduced."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        partial = []
        for root, module in self.session.roots:
            for name, group in torchlib.groups(module):
                if group.is_unsharded and any(_moves(p.sharded_param, held) for p in group.fsdp_params):
                    self.stale.add(group)
                if getattr(group, "_partial_reduce_output", None) is not None:
                    partial.append(root + name)
        if partial:
            self.session.recorder.write("partial", groups=partial, step=self.session.step_number())

    # -- reductions ---------------------------------------------------------------------------------------------------

    @_quiet
    def reducing(self, group: Any) -> None:
        """A group is about to reduce its gradients; written if a parameter of it brings none."""
        if (
            not group.reduce_grads
            or self.reductions >= _REDUCTIONS
            or not (missing := grouplib.without_gradient(group))
        ):
            return
        self.reductions += 1
        self.session.recorder.write(
            "reduce",
            group=grouplib.name_of(group),
            step=self.session.step_number(),
            micro=self.session.micro,
            missing=missing,
            parameters=sum(bool(p.sharded_param.requires_grad) for p in group.fsdp_params),
            filled=bool(getattr(group, "reduce_scatter_unused_params", False)),
            ranks=group.mesh_info.mesh.mesh.flatten().tolist(),
            at_line=self.session.recorder.here(),
        )

    @_quiet
    def flagged(self, value: bool) -> None:
        """`set_requires_all_reduce` was called; the first calls are recorded."""
        self.flags += 1
        if self.flags <= _FLAGS:
            line = self.session.recorder.here()
            self.session.recorder.write("all_reduce", value=value, step=self.session.step_number(), at_line=line)

    # -- views --------------------------------------------------------------------------------------------------------

    @_quiet
    def returned(self, state: Any, output: Any) -> None:
        """A wrapped module returns; outputs that are views are remembered with their version."""
        for tensor in torchlib.leaves(output):
            if isinstance(tensor, torch.Tensor) and _is_view(tensor) and len(self.views) < _VIEWS:
                line = self.session.recorder.here()
                self.views.append((weakref.ref(tensor), tensor._version, grouplib.modules_of(state), line))

    @_quiet
    def backward_begins(self) -> None:
        """Views that were changed in place since their module returned them."""
        changed = [(cls, line) for ref, version, cls, line in self.views if _changed(ref(), version)]
        self.views.clear()
        for cls, line in changed[:4]:
            self.session.recorder.write("inplace_view", module=cls, step=self.session.step_number(), at_line=line)


def install(session: Session) -> None:
    """Listen; everything here only records."""
    listener = Listener(session)
    _listen_to_session(session, listener)
    _listen_to_state_dicts(session)
    _listen_to_from_local(session)
    if not session.stand_in:
        _listen_to_groups(session, listener)


def _listen_to_session(session: Session, listener: Listener) -> None:
    on_shard, adopt, on_call, on_step = session.on_shard, session.adopt, session.on_call, session.on_step

    def sharded(modules: list[nn.Module], options: dict[str, Any]) -> None:
        on_shard(modules, options)
        listener.wrapped(modules, options)

    def adopted(root: nn.Module) -> None:
        adopt(root)
        listener.adopted(root)

    def called(module: nn.Module, arguments: Callable[[], list[Any]]) -> None:
        again = session.in_backward  # recomputed: no root is called, and selective checkpointing counts each operator
        if not session.stand_in and not again:
            listener.called(module, not torch.is_grad_enabled())
        if not listener.foreign and not again and any(torchlib.layout(v, 0)["sharded"] for v in arguments()):
            listener.foreign = True
            session.recorder.write("sharded_input", at_line=session.recorder.here())
        on_call(module, arguments)

    def stepping(optimizer: torch.optim.Optimizer, closure: bool) -> None:
        on_step(optimizer, closure)
        listener.stepping(optimizer)

    session.on_shard, session.adopt = sharded, adopted  # type: ignore[method-assign]
    session.on_call, session.on_step = called, stepping  # type: ignore[method-assign]


def _listen_to_groups(session: Session, listener: Listener) -> None:
    flag = FSDPModule.set_requires_all_reduce
    reduce, shard, pre_backward = grouplib.reduction(), grouplib.sharding(), grouplib.returning()
    backward = torch.autograd.backward

    @functools.wraps(flag)
    def flagged(module: FSDPModule, requires_all_reduce: bool, *args: Any, **kwargs: Any) -> None:
        listener.flagged(bool(requires_all_reduce))
        flag(module, requires_all_reduce, *args, **kwargs)

    def reduced(group: Any, *args: Any) -> Any:
        listener.reducing(group)
        return reduce(group, *args)

    def resharded(group: Any) -> Any:
        listener.stale.discard(group)
        return shard(group)

    def returned(state: Any, output: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            listener.returned(state, output)
        return pre_backward(state, output)

    @functools.wraps(backward)
    def ran(*args: Any, **kwargs: Any) -> None:
        if not session.in_backward:
            listener.backward_begins()
        backward(*args, **kwargs)

    FSDPModule.set_requires_all_reduce = flagged  # type: ignore[method-assign, assignment]
    grouplib.listen(reduced, resharded, returned)
    torch.autograd.backward = ran


def _listen_to_state_dicts(session: Session) -> None:
    """What each rank hands to torch's setters, before they run: on one rank alone they wait for ever."""

    def heard(operation: str, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def done(*args: Any, **kwargs: Any) -> Any:
            given = args[1] if operation == "set_model_state_dict" and len(args) > 1 else kwargs.get("model_state_dict")
            if isinstance(given, dict):
                options = kwargs.get("options")
                session.recorder.write(
                    "set_state",
                    op=operation,
                    keys=len(given),
                    full=bool(getattr(options, "full_state_dict", False)),
                    broadcast=bool(getattr(options, "broadcast_from_rank0", False)),
                    strict=bool(getattr(options, "strict", True)),
                    at_line=session.recorder.here(),
                )
            return real(*args, **kwargs)

        return done

    for name in ("set_model_state_dict", "set_state_dict"):
        setattr(dsd, name, heard(name, getattr(dsd, name)))


def _listen_to_from_local(session: Session) -> None:
    """Which shape the script's own `DTensor.from_local` gives a tensor; torch's own calls are left out."""
    real = DTensor.from_local
    calls = 0

    @functools.wraps(real)
    def joined(*args: Any, **kwargs: Any) -> DTensor:
        nonlocal calls
        made = real(*args, **kwargs)
        if calls < _JOINED and not within_torch(sys._getframe(1).f_code.co_filename):
            calls += 1
            session.recorder.write(
                "from_local",
                shape=list(made.shape),
                local=list(torchlib.local(made).shape),
                ranks=made.device_mesh.mesh.flatten().tolist(),
                at_line=session.recorder.here(),
            )
        return made

    DTensor.from_local = staticmethod(joined)  # type: ignore[method-assign]


def _places(tie: list[tuple[Any, str, Any]]) -> set[tuple[int, str]]:
    return {(id(ref()), name) for ref, name, _ in tie}


def _is_view(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and tensor._base is not None


def _moves(param: torch.Tensor, held: set[int]) -> bool:
    return id(param) in held and param.grad is not None


def _changed(tensor: torch.Tensor | None, version: int) -> bool:
    return tensor is not None and tensor._version != version
