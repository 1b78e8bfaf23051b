"""Where the probe listens. Each hook calls the session and then does what torch would have done."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.fsdp as fsdp
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from . import (
    alone,
    hooks_checkpoint,
    hooks_data,
    hooks_gradients,
    hooks_libraries,
    hooks_memory,
    hooks_optimizer,
    hooks_precision,
    hooks_progress,
    hooks_recompute,
    hooks_traffic,
    hooks_wrapping,
    simulation,
    standin,
    torchlib,
)
from .guard import guard_methods, guarded
from .session import Session

_GUARDED = (
    *(
        "on_call",
        "adopt",
        "fill",
        "on_shard",
        "on_sync_flag",
        "on_divide_factor",
        "on_checkpoint",
        "on_criterion",
        "on_local",
    ),
    *("on_inexact", "on_backward", "on_optimizer", "on_step", "on_closed", "on_stepped", "_record_step"),
)


def install(session: Session) -> None:
    """Listen to everything that happens in this process from now on."""
    _listen_to_calls(session)
    _listen_to_sharding(session)
    _listen_to_backward(session)
    _listen_to_criterion(session)
    _listen_to_dropout(session)
    _listen_to_autocast(session)
    _listen_to_optimizers(session)
    _listen_to_exit(session)
    for topic in (
        hooks_checkpoint,
        hooks_traffic,
        hooks_precision,
        hooks_gradients,
        hooks_optimizer,
        hooks_data,
        hooks_wrapping,
        hooks_libraries,
        hooks_recompute,
        hooks_memory,
        hooks_progress,  # last: it listens around the others
    ):
        guarded(session.recorder, f"{topic.__name__.rpartition('.')[2]}.install", topic.install)(session)
    guard_methods(session.recorder, session, _GUARDED)
    if session.stand_in:
        standin.install(session)
    if session.request["mode"] == "simulate":
        simulation.install(session)


def _listen_to_calls(session: Session) -> None:
    call = nn.Module.__call__
    to_empty = nn.Module.to_empty

    @functools.wraps(call)
    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return call(module, *args, **kwargs)
        if session.depth == 0:
            session.on_call(module, lambda: torchlib.leaves((args, kwargs)))
        session.depth += 1
        try:
            return call(module, *args, **kwargs)
        finally:
            session.depth -= 1

    @functools.wraps(to_empty)
    def emptied(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        result = to_empty(module, *args, **kwargs)
        with torch.no_grad():
            session.fill(module)
        return result

    nn.Module.__call__ = called  # type: ignore[method-assign]
    nn.Module.to_empty = emptied  # type: ignore[method-assign, assignment]


def _listen_to_sharding(session: Session) -> None:
    real = fsdp.fully_shard
    shard = standin.mark if session.stand_in else alone.sharder(real) if session.alone else real

    @functools.wraps(real)
    def sharded(module: Any, **options: Any) -> Any:
        session.on_shard(list(module) if isinstance(module, list | tuple) else [module], options)
        if session.request["exact"] and "mp_policy" in options:
            options["mp_policy"] = MixedPrecisionPolicy()
        return shard(module, **options)

    torchlib.replace_everywhere(real, sharded)

    register = fsdp.register_fsdp_forward_method

    @functools.wraps(register)
    def registered(module: nn.Module, method_name: str) -> None:
        if not session.stand_in:
            register(module, method_name)
        method = getattr(module, method_name)

        @functools.wraps(method)
        def called(*args: Any, **kwargs: Any) -> Any:
            if session.depth == 0:
                session.on_call(module, lambda: torchlib.leaves((args, kwargs)))
            session.depth += 1
            try:
                with standin.forward_method(module) if session.stand_in else contextlib.nullcontext():
                    return method(*args, **kwargs)
            finally:
                session.depth -= 1

        setattr(module, method_name, called)

    torchlib.replace_everywhere(register, registered)

    set_sync = FSDPModule.set_requires_gradient_sync

    @functools.wraps(set_sync)
    def synced(module: FSDPModule, requires_gradient_sync: bool, *args: Any, **kwargs: Any) -> None:
        session.on_sync_flag(bool(requires_gradient_sync))
        set_sync(module, requires_gradient_sync, *args, **kwargs)

    divide = getattr(FSDPModule, torchlib.DIVIDE)

    @functools.wraps(divide)
    def divided(module: FSDPModule, factor: float) -> None:
        session.on_divide_factor(factor)
        divide(module, alone.factor(factor) if session.alone else factor)

    setattr(FSDPModule, torchlib.DIVIDE, divided)
    FSDPModule.set_requires_gradient_sync = synced  # type: ignore[method-assign, assignment]


def _listen_to_backward(session: Session) -> None:
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def ran(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if session.in_backward:
            return backward(tensors, *args, **kwargs)
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        session.in_backward = True
        try:
            backward(tensors, *args, **kwargs)
            if session.alone:
                alone.after_backward()
            standin.after_backward(session)
        finally:
            session.in_backward = False
        with torch.no_grad():
            session.on_backward(given)
        return None

    torch.autograd.backward = ran


def _listen_to_criterion(session: Session) -> None:
    entropy, likelihood = F.cross_entropy, F.nll_loss
    busy = False

    def heard(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(real)
        def computed(input: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            nonlocal busy
            if torch.compiler.is_compiling() or busy:
                return real(input, target, *args, **kwargs)
            busy = True
            try:
                value = real(input, target, *args, **kwargs)
            finally:
                busy = False
            named = dict(zip(("weight", "size_average", "ignore_index", "reduce", "reduction"), args, strict=False))
            named.update(kwargs)
            if not target.is_floating_point() and named.get("weight") is None:
                valid = int((target != named.get("ignore_index", -100)).sum())
                session.on_criterion(str(named.get("reduction", "mean")), valid, value)
            return value

        return computed

    F.cross_entropy, F.nll_loss = heard(entropy), heard(likelihood)


def _listen_to_dropout(session: Session) -> None:
    """Note that dropout is active; in an exact run, switch it off, so that no random mask stands between two world sizes."""
    exact = session.request["exact"] or session.request["dropless"]

    def heard(real: Callable[..., Any], key: str, position: int) -> Callable[..., Any]:
        @functools.wraps(real)
        def dropped(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                rate = args[position] if len(args) > position else kwargs.get(key, 0.5 if key == "p" else 0.0)
                on = args[2] if key == "p" and len(args) > 2 else kwargs.get("training", True)
                if rate and on:
                    session.on_inexact("dropout")
                    if exact:
                        args = (*args[:position], *((0.0, *args[position + 1 :]) if len(args) > position else ()))
                        kwargs = kwargs if len(args) > position else {**kwargs, key: 0.0}
            return real(*args, **kwargs)

        return dropped

    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        setattr(F, name, heard(getattr(F, name), "p", 1))
    F.scaled_dot_product_attention = heard(F.scaled_dot_product_attention, "dropout_p", 4)


def _listen_to_autocast(session: Session) -> None:
    """Note that autocast is used; in an exact run, leave it off."""
    init = torch.autocast.__init__

    @functools.wraps(init)
    def constructed(self: torch.autocast, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if self._enabled:
            session.on_inexact("autocast")
            self._enabled = not session.request["exact"]

    torch.autocast.__init__ = constructed  # type: ignore[method-assign]


def _listen_to_optimizers(session: Session) -> None:
    init = Optimizer.__init__
    depth = 0

    @functools.wraps(init)
    def constructed(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        nonlocal depth
        depth += 1
        try:
            init(self, *args, **kwargs)
        finally:
            depth -= 1
        if depth == 0:
            session.on_optimizer(self)

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if _by_state_dict_helper():
            return None
        closure = kwargs.get("closure", next(iter(args[1:]), None))
        with torch.no_grad():
            session.on_step(optimizer, closure=callable(closure))
        if not callable(closure):
            return None

        @functools.wraps(closure)
        def closed(*given: Any, **named: Any) -> Any:
            value = closure(*given, **named)
            with torch.no_grad():
                session.on_closed()
            return value

        if "closure" in kwargs:
            return args, {**kwargs, "closure": closed}
        return (args[0], closed, *args[2:]), kwargs

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not _by_state_dict_helper():
            with torch.no_grad():
                session.on_stepped(optimizer)

    Optimizer.__init__ = constructed  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _by_state_dict_helper() -> bool:
    """torch's state-dict helpers step an optimizer once with zero gradients to create its state; that is no training step."""
    frame = sys._getframe(2)
    for _ in range(8):
        if frame.f_code.co_name == "_init_optim_state":
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def _listen_to_exit(session: Session) -> None:
    leave = os._exit

    def left(code: int) -> None:
        session.recorder.write("end", how="os._exit", code=code, frames=session.recorder.stack())
        session.recorder.sync()
        leave(code)

    os._exit = left  # type: ignore[assignment]
