"""Replaces `fully_shard` by real DDP, so that a script becomes its own reference without an edit.

`mark` gives a module the methods of FSDPModule and nothing else; the outermost marked module is
wrapped in DistributedDataParallel at its first call. `set_requires_gradient_sync` sets DDP's own
flag. With one rank there is nothing to reduce and the module runs as it is. Plain tensors return
themselves from `full_tensor()`, `to_local()` and `_local_tensor`.

DDP's reducer takes no DTensor and would average over all ranks, so beside tensor parallelism the
gradients are averaged with a manual all-reduce over the mesh that the script gives to
`fully_shard`; the other dims stay as they are.
"""

import functools
import gc
import types
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
from ..events.sharding import FLAGS
from ..session import Session

_state: dict[str, Any] = {}


class DDPSubstitute(FSDPModule):
    """The surface of FSDPModule on a module whose parameters stay plain tensors."""

    _orig_cls_mro_index = 3

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session: Session = _state["session"]
        if _state["inside"]:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        if session.progress.depth == 0:
            session.publish("call", _module(self), lambda: tensors.tensors((args, kwargs)))
        _state["inside"] = True
        session.progress.depth += 1
        try:
            if (wrapper := _wrapper(_module(self))) is not None:
                return wrapper(*args, **kwargs)
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        finally:
            _state["inside"] = False
            session.progress.depth -= 1

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        session: Session = _state["session"]
        if session.first("sync", FLAGS):
            session.write(Sync(at_line=session.here()))
        _state["sync"] = requires_gradient_sync
        for wrapper in _state["wrappers"].values():
            wrapper.require_backward_grad_sync = requires_gradient_sync

    def set_gradient_divide_factor(self, factor: float) -> None:
        """FSDP divides the sum over ranks by `factor`, for the parameters of this module's own
        group; DDP by their number.
        """
        session: Session = _state["session"]
        session.write(Divide(factor=float(factor), at_line=session.here()))
        _module(self).__dict__["_divide_factor"] = factor
        _state["divided"] = True

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def unshard(self, async_op: bool = False) -> Any:
        return types.SimpleNamespace(wait=lambda: None) if async_op else None

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Swap parameters in place, as torch does for DTensors, so that tied ones stay tied in
        `to_empty`.
        """
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return super(FSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)


def _scale(root: nn.Module) -> None:
    """Scale the gradients of modules with a factor of their own; called before a forward, since
    `to_empty` swaps tensors without hooks.
    """
    for own, params in _groups(root) if _state.pop("divided", False) else ():
        if "_divide_factor" in own.__dict__:
            for param in params:
                if id(param) not in _state["scaled"] and param.requires_grad:
                    _state["scaled"].add(id(param))
                    param.register_hook(functools.partial(_scaled, module=own))  # type: ignore[no-untyped-call]


def _groups(root: nn.Module) -> list[tuple[nn.Module, list[nn.Parameter]]]:
    """Each marked module, and `root`, with the parameters that `fully_shard` of it manages: not
    those of marked modules inside it.
    """
    marked = [
        module
        for module in root.modules()
        if isinstance(module, DDPSubstitute) and module is not root
    ]
    found: list[tuple[nn.Module, list[nn.Parameter]]] = []
    taken: set[int] = set()
    for own in (*reversed(marked), root):
        params = [param for param in own.parameters() if id(param) not in taken]
        taken.update(map(id, params))
        found.append((own, params))
    return found


def _scaled(grad: torch.Tensor, module: nn.Module) -> torch.Tensor:
    return grad * float(tensors.ranks_of(_mesh(module)) / module.__dict__["_divide_factor"])


def _nothing(self: DDPSubstitute, *args: Any, **kwargs: Any) -> None:
    """A setting of FSDP that does not change the mathematics, or that DDP does not have."""


def _finalized(self: DDPSubstitute, *, async_op: bool = False) -> Any:
    """`finalize_backward` of torch 2.15: what backwards with the sync flag off have left is reduced
    with the flag as it is now.
    """
    _average_the_rest()
    _state["session"].gradients.last = {}
    return types.SimpleNamespace(wait=lambda: None) if async_op else None


if hasattr(FSDPModule, "finalize_backward"):
    DDPSubstitute.finalize_backward = _finalized  # type: ignore[attr-defined]
for _name, _value in vars(FSDPModule).items():
    if callable(_value) and not _name.startswith("__") and _name not in vars(DDPSubstitute):
        setattr(DDPSubstitute, _name, _nothing)


def install(session: Session) -> None:
    """Replace `fully_shard` by DDP, and give plain tensors the methods of DTensors that scripts
    use.
    """
    _state.update(session=session, wrappers={}, built=set(), scaled=set(), inside=False, sync=True)

    def registered(call: Call, proceed: Callable[[], Any]) -> Any:
        module, name = call.given(0, "module"), call.given(1, "method_name")
        setattr(module, name, _reduced_manually(module, getattr(module, name)))

    def whole(tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if session.first("local"):
            session.write(Local(at_line=session.here()))
        return tensor

    fsdp = "torch.distributed.fsdp"
    session.around(
        f"{fsdp}:fully_shard", replace=lambda call, proceed: mark(*call.args, **call.kwargs)
    )
    session.around(f"{fsdp}:register_fsdp_forward_method", replace=registered)
    finish_each(session, _average_the_rest)
    torch.Tensor.full_tensor = lambda tensor, **kwargs: tensor  # type: ignore[attr-defined]
    torch.Tensor.to_local = whole  # type: ignore[attr-defined]
    setattr(torch.Tensor, DTENSOR_PART, property(whole))  # a DTensor has its own


def mark(module: Any, **options: Any) -> Any:
    """Replaces `fully_shard(module, **options)`; like it, moves parameters to the current
    accelerator.
    """
    for item in module if isinstance(module, list | tuple) else [module]:
        if not isinstance(item, DDPSubstitute):
            item.__class__ = _marked(type(item))  # type: ignore[arg-type]
        item.__dict__["_mesh_of_fsdp"] = tensors.data_mesh(options)
        if torch.cuda.is_available() and any(p.device.type == "cpu" for p in item.parameters()):
            item.to(torch.device("cuda", torch.cuda.current_device()))
    return module


@functools.cache
def _marked(cls: type) -> type:
    return type(f"FSDP{cls.__name__}", (DDPSubstitute, cls), {})


def _reduced_manually(module: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method registered with `register_fsdp_forward_method`: DDP handles only `forward`, so the
    all-reduce is manual.
    """

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        _scale(module)
        if dist.is_initialized() and dist.get_world_size() > 1:
            _state["wrappers"].setdefault(id(module), _Manual(module))
        outer, _state["inside"] = _state["inside"], True
        try:
            return method(*args, **kwargs)
        finally:
            _state["inside"] = outer

    return called


def _average_the_rest() -> None:
    """All-reduce what DDP's reducer did not: it reduces once for each forward, with the sync flag
    at that time.

    The gradient accumulated so far is averaged; its part that was averaged before is equal on all
    ranks and does not change.
    """
    for wrapper in _state["wrappers"].values():
        if _state["sync"] and not wrapper.armed:
            _average(wrapper.module)
        wrapper.armed = False


def _average(module: nn.Module) -> None:
    """Average each gradient over the mesh of its own module: that of experts may have fewer ranks
    than that of the rest.
    """
    meshes: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for own, params in _groups(module):
        meshes.setdefault(_mesh(own), []).extend(p for p in params if p.requires_grad)
    for mesh, params in meshes.items():
        _average_over(mesh, params)


def _average_over(mesh: DeviceMesh | None, params: list[nn.Parameter]) -> None:
    """Every gradient that one of these ranks has; ranks without it contribute zeros."""
    groups = tensors.groups_of(mesh)
    present = torch.tensor([float(p.grad is not None) for p in params], device="cpu")
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
        part.div_(tensors.ranks_of(mesh))


def _mesh(module: nn.Module) -> DeviceMesh | None:
    """The mesh of data parallelism that the script gives for a marked module."""
    return module.__dict__.get("_mesh_of_fsdp")


class _Reference(DistributedDataParallel):
    """DDP, with whether its reducer waits for the next backward (`armed`) and the parameters that
    it was built for.
    """

    stands_in = True  # for `fully_shard`: it is none of the script's own
    armed = False
    trainable: set[int] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self.armed = self.require_backward_grad_sync
        return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]


class _Manual(nn.Module):
    """Replaces DDP for graphs that its reducer does not support: the module itself, never armed."""

    trainable: set[int] | None = None

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.armed = self.require_backward_grad_sync = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def _wrapper(module: nn.Module) -> nn.Module | None:
    """The DDP wrapper of an outermost marked module, made at its first call; None if there is
    nothing to reduce.
    """
    _scale(module)
    trainable = {id(p) for p in module.parameters() if p.requires_grad}
    # A module without trained parameters, or on one rank, has nothing to reduce: DDP refuses it
    # (frozen models (zoo/frozen_teacher)).
    if not trainable or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    wrappers: dict[int, _Reference | _Manual] = _state["wrappers"]
    if (old := wrappers.get(id(module))) is not None and old.trainable not in (None, trainable):
        # What is trained may change after wrapping (zoo/thawed_after_wrapping): DDP is built anew
        # then.
        # FSDP reads `requires_grad` at every forward, DDP only when it is built.
        del wrappers[id(module)], old
        gc.collect()  # the reducer removes its hooks from the parameters when it is destroyed
    if id(module) not in wrappers:
        # DDP takes no DTensor and would average over all ranks: beside tensor parallelism gradients
        # are averaged here (zoo/tp_fsdp).
        beside_tp = tensors.groups_of(_mesh(module)) != [None] or any(
            isinstance(p, DTensor) for p in module.parameters()
        )
        manual = _state["session"].request.by_hand or beside_tp
        made = wrappers[id(module)] = _Manual(module) if manual else _ddp(module, trainable)
        made.require_backward_grad_sync = _state["sync"]
    wrappers[id(module)].training = module.training
    return wrappers[id(module)]


def _ddp(module: nn.Module, trainable: set[int]) -> _Reference:
    with warnings.catch_warnings():
        # torch 2.13 renames broadcast_buffers; the old name is still supported
        warnings.simplefilter("ignore", FutureWarning)
        first = id(module) not in _state["built"]
        made = _Reference(
            module, broadcast_buffers=False, find_unused_parameters=True, init_sync=first
        )
    made.trainable = trainable
    _state["built"].add(id(module))
    return made


def _module(item: DDPSubstitute) -> nn.Module:
    assert isinstance(item, nn.Module)
    return item
