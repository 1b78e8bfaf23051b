"""`fully_shard` and the settings of the modules that it has sharded."""

import functools
import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, OffloadPolicy

from ...trace.events import Divide, Shard, ShardedParameter, Sync
from ..compat.groups import reduces_in
from ..compat.tensors import layout, own_parameters, tensors, versions
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


class Versions:
    """How often the parameters had been written when `fully_shard` returned."""

    def __init__(self, session: Session) -> None:
        # no reference to a parameter, not even a weak one: `to_empty` could not swap it then
        self._then: list[tuple[weakref.ref[nn.Module], str, int, tuple[int, int]]] = []

    def sharded(self, call: Call) -> None:
        """`fully_shard` has returned."""
        given = call.given(0, "module")
        for top in given if isinstance(given, list | tuple) else [given]:
            for module in top.modules():
                for name, param in own_parameters(module).items():
                    if param is not None:
                        entry = (weakref.ref(module), name, id(param), versions(param))
                        self._then.append(entry)

    def written(self) -> set[int]:
        """The ids of the parameters into which anything was written since."""
        found = set()
        for reference, name, known, then in self._then:
            module = reference()
            param = own_parameters(module).get(name) if module is not None else None
            if param is not None and id(param) == known:
                now = versions(param)
                if any(later > before for later, before in zip(now, then, strict=True)):
                    found.add(known)
        return found


class Sharding:
    """The calls of `fully_shard`, and of the settings of what it has sharded."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def sharding(self, call: Call) -> None:
        """`fully_shard` is about to be applied."""
        given = call.given(0, "module")
        self.session.publish(
            "shard", list(given) if isinstance(given, list | tuple) else [given], call.kwargs
        )

    def shard(self, modules: list[nn.Module], options: dict[str, Any]) -> None:
        """Record what is about to be sharded, and how."""
        session = self.session
        below = {id(inner) for module in modules for inner in module.modules()}
        session.tops = [top for top in session.tops if id(top()) not in below] + [
            weakref.ref(m) for m in modules
        ]
        param, reduce, output = _dtypes(modules, options.get("mp_policy"))
        session.write(
            Shard(
                modules=[class_name(module) for module in modules],
                param_dtype=param,
                reduce_dtype=reduce,
                output_dtype=output,
                unread=_unread(options),
                parameters=_plain(modules),
                ignored=sum(map(torch.is_tensor, options.get("ignored_params") or ())),
                at_line=session.here(),
            )
        )

    def registered(self, call: Call) -> None:
        """A method has been made a forward."""
        _watch_method(self.session, call.given(0, "module"), call.given(1, "method_name"))

    def synced(self, call: Call) -> None:
        """Gradient synchronisation is about to be set."""
        if self.session.first("sync", FLAGS):
            self.session.write(Sync(at_line=self.session.here()))

    def divided(self, call: Call) -> None:
        """The factor that gradients are divided by is about to be set."""
        factor = float(call.given(1, "factor"))
        self.session.write(Divide(factor=factor, at_line=self.session.here()))


def install(session: Session) -> None:
    """Subscribe to `fully_shard` and to the settings."""
    topic = Sharding(session)
    fsdp = "torch.distributed.fsdp"
    session.around(
        f"{fsdp}:fully_shard", before=topic.sharding, after=session.one(Versions).sharded
    )
    session.around(f"{fsdp}:register_fsdp_forward_method", after=topic.registered)
    session.around(f"{fsdp}:FSDPModule.set_requires_gradient_sync", before=topic.synced)
    session.around(f"{fsdp}:FSDPModule.{DIVIDE}", before=topic.divided)
    session.subscribe("shard", topic.shard)


def _dtypes(modules: list[nn.Module], policy: Any) -> list[str | None]:
    """The dtypes of a policy: of parameters, of the reduction, of outputs."""
    parameters = (one for module in modules for one in module.parameters())
    dtypes = (
        getattr(policy, "param_dtype", None),
        reduces_in(policy, parameters) if policy else None,
        getattr(policy, "output_dtype", None),
    )
    return [None if dtype is None else dtype_name(dtype) for dtype in dtypes]


def _plain(modules: list[nn.Module]) -> list[ShardedParameter]:
    """The parameters that are not sharded yet."""
    return [
        ShardedParameter(
            name=name, cls=class_name(module), dtype=str(plain.dtype), sketch=sketch(plain)
        )
        for module in modules
        for name, plain in module.named_parameters()
        if not layout(plain, 0).sharded and plain.device.type != "meta"
    ]


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
        if session.progress.depth == 0:
            session.publish("call", module, lambda: tensors((args, kwargs)))
        session.progress.depth += 1
        try:
            return method(*args, **kwargs)
        finally:
            session.progress.depth -= 1

    setattr(module, name, called)
