"""`fully_shard` and the settings of what it has sharded."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, OffloadPolicy

from ...trace.events import Divide, Shard, ShardedParameter, Sync
from ..compat.tensors import layout, tensors
from ..dispatcher import Call
from ..measures import class_name, dtype_of
from ..session import Session
from ..sketch import sketch

_FLAGS = 32  # calls of a flag that are recorded
# its name since some version after 2.7.1, and its name there
DIVIDE = next(n for n in ("set_gradient_divide_factor", "set_reduce_scatter_divide_factor") if hasattr(FSDPModule, n))


def install(session: Session) -> None:
    """Subscribe to the functions of FSDP2."""
    flags = 0

    def sharding(call: Call) -> None:
        given = call.given(0, "module")
        modules = list(given) if isinstance(given, list | tuple) else [given]
        session.publish("shard", modules, call.kwargs)

    def shard(modules: list[nn.Module], options: dict[str, Any]) -> None:
        _record(session, modules, options)

    def registered(call: Call) -> None:
        _watch_method(session, call.given(0, "module"), call.given(1, "method_name"))

    def synced(call: Call) -> None:
        nonlocal flags
        flags += 1
        if flags <= _FLAGS:
            session.write(Sync(at_line=session.here()))

    def divided(call: Call) -> None:
        session.write(Divide(factor=float(call.given(1, "factor")), at_line=session.here()))

    around = session.dispatcher.around
    around("torch.distributed.fsdp:fully_shard", before=sharding)
    around("torch.distributed.fsdp:register_fsdp_forward_method", after=registered)
    around("torch.distributed.fsdp:FSDPModule.set_requires_gradient_sync", before=synced)
    around(f"torch.distributed.fsdp:FSDPModule.{DIVIDE}", before=divided)
    session.subscribe("shard", shard)


def _record(session: Session, modules: list[nn.Module], options: dict[str, Any]) -> None:
    below = {id(inner) for module in modules for inner in module.modules()}
    session.tops = [top for top in session.tops if id(top()) not in below] + [weakref.ref(m) for m in modules]
    policy = options.get("mp_policy")
    session.write(
        Shard(
            modules=[class_name(module) for module in modules],
            param_dtype=dtype_of(policy, "param_dtype"),
            reduce_dtype=dtype_of(policy, "reduce_dtype"),
            output_dtype=dtype_of(policy, "output_dtype"),
            unread=_unread(options),
            parameters=[
                ShardedParameter(name=name, cls=class_name(module), dtype=str(param.dtype), sketch=sketch(param))
                for module in modules
                for name, param in module.named_parameters()
                if not layout(param, 0).sharded and param.device.type != "meta"
            ],
            at_line=session.here(),
        )
    )


def _unread(options: dict[str, Any]) -> list[str]:
    """Options of `fully_shard` that it takes and does nothing with, in words."""
    offload = options.get("offload_policy")
    found = []
    if offload and not isinstance(offload, OffloadPolicy):
        found.append(f"`offload_policy` is a {type(offload).__name__} and no CPUOffloadPolicy: nothing is offloaded")
    others = [type(thing).__name__ for thing in options.get("ignored_params") or () if not torch.is_tensor(thing)]
    if others:
        found.append(
            f"`ignored_params` holds no parameters but {', '.join(sorted(set(others)))}: nothing is ignored for it"
        )
    return found


def _watch_method(session: Session, module: nn.Module, name: str) -> None:
    """A method that FSDP treats as a forward is a call of the module."""
    method = getattr(module, name)

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        if session.depth == 0:
            session.publish("call", module, lambda: tensors((args, kwargs)))
        session.depth += 1
        try:
            return method(*args, **kwargs)
        finally:
            session.depth -= 1

    setattr(module, name, called)
