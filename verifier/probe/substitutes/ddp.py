"""`fully_shard` standing in as real DDP, so that a script becomes its own reference without an edit.

`mark` gives a module the methods of FSDPModule and nothing else; the outermost marked module is wrapped in
DistributedDataParallel at its first call. `set_requires_gradient_sync` drives DDP's own flag. With one rank there is
nothing to reduce and the module runs as it is. Plain tensors answer `full_tensor()`, `to_local()` and
`_local_tensor` with themselves.

Beside tensor parallelism DDP has no place: its reducer takes no DTensor and would average over all ranks. There the
gradients are averaged by hand over the mesh that the script gives to `fully_shard`, and the other dims stay as they are.
"""

import functools
import gc
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ...trace.events import Divide, Local, Sync
from ..compat import tensors
from ..compat.names import DTENSOR_PART
from ..dispatcher import Call
from ..events.backward import finish_each
from ..session import Session

_state: dict[str, Any] = {}
_classes: dict[type, type] = {}
_FLAGS = 32  # calls of `set_requires_gradient_sync` that are recorded


class DDPSubstitute(FSDPModule):
    """The surface of FSDPModule on a module whose parameters stay plain tensors."""

    _orig_cls_mro_index = 3

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session: Session = _state["session"]
        if _state["inside"]:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        if session.depth == 0:
            session.publish("call", _module(self), lambda: tensors.tensors((args, kwargs)))
        _state["inside"] = True
        session.depth += 1
        try:
            if (wrapper := _wrapper(_module(self))) is not None:
                return wrapper(*args, **kwargs)
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        finally:
            _state["inside"] = False
            session.depth -= 1

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        session: Session = _state["session"]
        _state["flags"] += 1
        if _state["flags"] <= _FLAGS:
            session.write(Sync(at_line=session.here()))
        _state["sync"] = requires_gradient_sync
        for wrapper in _state["wrappers"].values():
            wrapper.require_backward_grad_sync = requires_gradient_sync

    def set_gradient_divide_factor(self, factor: float) -> None:
        """FSDP divides the sum over ranks by `factor`, for the parameters of this module's own group; DDP by their number."""
        session: Session = _state["session"]
        session.write(Divide(factor=float(factor), at_line=session.here()))
        own = _module(self)
        nested = {id(p) for m in own.modules() if m is not own and isinstance(m, DDPSubstitute) for p in m.parameters()}
        for param in own.parameters():
            if id(param) not in nested and param.requires_grad:
                if id(param) not in _state["factors"]:
                    param.register_hook(_scaled(id(param), _ranks(own)))  # type: ignore[no-untyped-call]
                _state["factors"][id(param)] = factor

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def unshard(self, async_op: bool = False) -> Any:
        return _Handle() if async_op else None

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """As torch does it for DTensors: a parameter is swapped in place, so that `to_empty` leaves a tied one tied."""
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return super(FSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)


def _scaled(key: int, ranks: int) -> Any:
    def scale(grad: torch.Tensor) -> torch.Tensor:
        factor: float = _state["factors"][key]
        return grad * (ranks / factor)

    return scale


class _Handle:
    def wait(self) -> None:
        """Nothing to wait for."""


def _nothing(self: DDPSubstitute, *args: Any, **kwargs: Any) -> None:
    """A setting of FSDP that changes no mathematics, or that DDP has no counterpart for."""


for _name, _value in vars(FSDPModule).items():
    if callable(_value) and not _name.startswith("__") and _name not in vars(DDPSubstitute):
        setattr(DDPSubstitute, _name, _nothing)


def install(session: Session) -> None:
    """From now on `fully_shard` gives what DDP stands in for; plain tensors answer the questions that scripts put to DTensors."""
    _state.update(session=session, wrappers={}, built=set(), factors={}, inside=False, sync=True, flags=0)
    asked = False

    def sharded(call: Call, proceed: Callable[[], Any]) -> Any:
        return mark(*call.args, **call.kwargs)

    def registered(call: Call, proceed: Callable[[], Any]) -> Any:
        module, name = call.given(0, "module"), call.given(1, "method_name")
        setattr(module, name, _reduced_by_hand(module, getattr(module, name)))

    def itself(tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return tensor

    def whole(tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        nonlocal asked
        if not asked:
            asked = True
            session.write(Local(at_line=session.here()))
        return tensor

    session.dispatcher.around("torch.distributed.fsdp:fully_shard", replace=sharded)
    session.dispatcher.around("torch.distributed.fsdp:register_fsdp_forward_method", replace=registered)
    finish_each(session, _average_the_rest)
    torch.Tensor.full_tensor = itself  # type: ignore[attr-defined]
    torch.Tensor.to_local = whole  # type: ignore[attr-defined]
    setattr(torch.Tensor, DTENSOR_PART, property(whole))  # a DTensor has its own


def mark(module: Any, **options: Any) -> Any:
    """In place of `fully_shard(module, **options)`."""
    ignored = options.get("ignored_params") or set()
    for item in module if isinstance(module, list | tuple) else [module]:
        cls = type(item)
        if not isinstance(item, DDPSubstitute):
            made = _classes.get(cls) or type(f"FSDP{cls.__name__}", (DDPSubstitute, cls), {})
            _classes[cls] = made
            item.__class__ = made
        item.__dict__.setdefault("_ignored_by_fsdp", set()).update(id(p) for p in ignored)
        item.__dict__["_mesh_of_fsdp"] = tensors.data_mesh(options)
        _move(item)
    return module


def _reduced_by_hand(module: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method registered with `register_fsdp_forward_method`: DDP knows only `forward`, so averaging is by hand."""

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        if dist.is_initialized() and dist.get_world_size() > 1:
            _state["wrappers"].setdefault(id(module), _ByHand(module))
        outer, _state["inside"] = _state["inside"], True
        try:
            return method(*args, **kwargs)
        finally:
            _state["inside"] = outer

    return called


def _average_the_rest() -> None:
    """Average by hand what DDP's reducer did not: it works once for each forward, with the sync flag that it met there.

    What is averaged is the gradient accumulated so far; the part that was averaged before is equal on all ranks and stays.
    """
    for wrapper in _state["wrappers"].values():
        if _state["sync"] and not wrapper.armed:
            _average(wrapper.module)
        wrapper.armed = False


def _average(module: nn.Module) -> None:
    """Average over the data-parallel ranks every gradient that one of them has; who has none has zeros."""
    params = [p for p in module.parameters() if p.requires_grad]
    groups = _groups(module)
    present = torch.tensor([float(p.grad is not None) for p in params])
    present = present.to(tensors.local(params[0]).device) if params else present
    for group in groups:
        dist.all_reduce(present, group=group)
    for param, count in zip(params, present.tolist(), strict=True):
        if count == 0.0:
            continue
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        if isinstance(param.grad, DTensor) and isinstance(param, DTensor):
            param.grad = param.grad.redistribute(param.device_mesh, param.placements)
        part = tensors.local(param.grad)
        for group in groups:
            dist.all_reduce(part, op=dist.ReduceOp.SUM, group=group)
        part.div_(_ranks(module))


def _groups(module: nn.Module) -> list[Any]:
    """The process groups over which the gradients of a marked module are reduced, one after the other."""
    return tensors.groups_of(module.__dict__.get("_mesh_of_fsdp"))


def _ranks(module: nn.Module) -> int:
    """How many ranks share the gradients of a marked module."""
    mesh: DeviceMesh | None = module.__dict__.get("_mesh_of_fsdp")
    if mesh is not None:
        return int(mesh.size())
    return dist.get_world_size() if dist.is_initialized() else 1


def _beside_tensor_parallelism(module: nn.Module) -> bool:
    return _groups(module) != [None] or any(isinstance(p, DTensor) for p in module.parameters())


class _Reference(DistributedDataParallel):
    """DDP that remembers whether its reducer waits for the next backward, and which parameters it was built for."""

    armed = False
    trainable: set[int] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self.armed = self.require_backward_grad_sync
        return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]


class _ByHand(nn.Module):
    """In the place of DDP, for graphs that its reducer refuses: the module itself, never armed, whatever is trainable."""

    trainable: set[int] | None = None

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.armed = self.require_backward_grad_sync = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def _wrapper(module: nn.Module) -> nn.Module | None:
    """The DDP wrapper of an outermost marked module, made at its first call; None where there is nothing to reduce."""
    trainable = {id(p) for p in module.parameters() if p.requires_grad}
    if not trainable or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if (old := _state["wrappers"].get(id(module))) is not None and old.trainable not in (None, trainable):
        # FSDP reads `requires_grad` at every forward, DDP only when it is built.
        del _state["wrappers"][id(module)], old
        gc.collect()  # the reducer takes its hooks off the parameters when it is destroyed
    if id(module) not in _state["wrappers"]:
        made: _Reference | _ByHand
        with warnings.catch_warnings():
            # torch 2.13 renames broadcast_buffers; the old name still means what is needed here.
            warnings.simplefilter("ignore", FutureWarning)
            if _state["session"].request["by_hand"] or _beside_tensor_parallelism(module):
                made = _ByHand(module)
            else:
                first = id(module) not in _state["built"]
                made = _Reference(module, broadcast_buffers=False, find_unused_parameters=True, init_sync=first)
                made.trainable = trainable
                _state["built"].add(id(module))
        made.require_backward_grad_sync = _state["sync"]
        _state["wrappers"][id(module)] = made
    wrapper: nn.Module = _state["wrappers"][id(module)]
    wrapper.training = module.training
    return wrapper


def _module(item: DDPSubstitute) -> nn.Module:
    assert isinstance(item, nn.Module)
    return item


def _move(module: nn.Module) -> None:
    """`fully_shard` moves parameters to the current accelerator; so does its stand-in."""
    if torch.cuda.is_available() and any(p.device.type == "cpu" for p in module.parameters()):
        module.to(torch.device("cuda", torch.cuda.current_device()))
