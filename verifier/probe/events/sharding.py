"""`fully_shard` and the settings of the modules that it has sharded."""

import functools
import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, OffloadPolicy

from ...trace.events import Divide, Shard, ShardedParameter, Sync
from ..compat.groups import reduces_in
from ..compat.tensors import layout, tensors
from ..dispatcher import Call
from ..measures import class_name, dtype_name
from ..session import Session
from ..tensor_fingerprint import sketch

FLAGS = 32  # calls of `set_requires_...` that are recorded
# its name since some version after 2.7.1, and its name there
DIVIDE = next(
    n
    for n in ("set_gradient_divide_factor", "set_reduce_scatter_divide_factor")
    if hasattr(FSDPModule, n)
)


def install(session: Session) -> None:
    def sharding(call: Call) -> None:
        given = call.given(0, "module")
        session.publish(
            "shard", list(given) if isinstance(given, list | tuple) else [given], call.kwargs
        )

    def shard(modules: list[nn.Module], options: dict[str, Any]) -> None:
        below = {id(inner) for module in modules for inner in module.modules()}
        session.tops = [top for top in session.tops if id(top()) not in below] + [
            weakref.ref(m) for m in modules
        ]
        policy = options.get("mp_policy")
        reduces = (
            reduces_in(policy, (one for module in modules for one in module.parameters()))
            if policy
            else None
        )
        dtypes = (
            getattr(policy, "param_dtype", None),
            reduces,
            getattr(policy, "output_dtype", None),
        )
        param, reduce, output = (None if dtype is None else dtype_name(dtype) for dtype in dtypes)
        session.write(
            Shard(
                modules=[class_name(module) for module in modules],
                param_dtype=param,
                reduce_dtype=reduce,
                output_dtype=output,
                unread=_unread(options),
                parameters=[
                    ShardedParameter(
                        name=name,
                        cls=class_name(module),
                        dtype=str(plain.dtype),
                        sketch=sketch(plain),
                    )
                    for module in modules
                    for name, plain in module.named_parameters()
                    if not layout(plain, 0).sharded and plain.device.type != "meta"
                ],
                at_line=session.here(),
            )
        )

    def registered(call: Call) -> None:
        _watch_method(session, call.given(0, "module"), call.given(1, "method_name"))

    def synced(call: Call) -> None:
        if session.first("sync", FLAGS):
            session.write(Sync(at_line=session.here()))

    def divided(call: Call) -> None:
        session.write(Divide(factor=float(call.given(1, "factor")), at_line=session.here()))

    session.around("torch.distributed.fsdp:fully_shard", before=sharding)
    session.around("torch.distributed.fsdp:register_fsdp_forward_method", after=registered)
    session.around("torch.distributed.fsdp:FSDPModule.set_requires_gradient_sync", before=synced)
    session.around(f"torch.distributed.fsdp:FSDPModule.{DIVIDE}", before=divided)
    session.subscribe("shard", shard)


def _unread(options: dict[str, Any]) -> list[str]:
    """Options of `fully_shard` that have no effect because of their type, each with the reason."""
    offload = options.get("offload_policy")
    found = []
    if offload and not isinstance(offload, OffloadPolicy):
        found.append(
            f"`offload_policy` is a {type(offload).__name__}, not a CPUOffloadPolicy: nothing is"
            " offloaded"
        )
    others = {
        type(item).__name__
        for item in options.get("ignored_params") or ()
        if not torch.is_tensor(item)
    }
    if others:
        found.append(
            f"`ignored_params` holds {', '.join(sorted(others))} instead of parameters: they are"
            " not ignored"
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
