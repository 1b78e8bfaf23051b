"""How each operator is executed: on shapes where values are unknown, really where they are known.

Unknown are the values of floating-point tensors on CUDA and of large ones on the CPU: those are
hollow. Integers and booleans that a script computes from its data stay known, on CUDA too: masks,
lengths and indices decide about control flow and shapes. A single number, such as a loss or a norm,
is a stand-in, with which the script computes on.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...capacity.recorder import Recorder
from ...compat.flops import formula
from ...compat.operators import schema, tree_map_only
from . import unknown
from .collectives import communicate, is_collective
from .storage import hollow, is_hollow, shape_of
from .traffic import moved

LARGEST = 1 << 20  # bytes of a floating-point tensor that is really computed on the CPU
LARGEST_WHOLE = 1 << 28  # of integers
_META = torch.device("meta")
_VIEW, _IN_PLACE, _NUMBER, _NEW = "view", "in place", "number", "new"
# They change the shape, or the storage, of their first argument, or view it.
_SHAPES = {
    "resize_",
    "set_",
    "t_",
    "transpose_",
    "squeeze_",
    "unsqueeze_",
    "as_strided_",
    "swapaxes_",
    "resize_as_",
    "detach_",
    "_unsafe_view",  # of a matrix product: the schema calls it a new tensor, and it is a view
}

_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}

_RESULTS: dict[Any, Any] = {}
_MOST_RESULTS = 1 << 14


def execute(
    func: Any, given: Sequence[Tensor], there: torch.device | None, *args: Any, **kwargs: Any
) -> Any:
    """The result of an operator; `given` are its tensors, `there` the device on which its result
    lies.
    """
    if is_collective(func):
        return communicate(func, args, kwargs, lambda: _executed(func, args, kwargs, given, there))
    result = _executed(func, args, kwargs, given, there)
    if there is None or there.type != "cuda":
        return result
    if (count := formula(func)) is None:
        Recorder.now.moves(moved(func, given, result))
    else:
        causal = _causal(func)
        masked = causal is not None and (
            args[causal] if causal < len(args) else kwargs.get("is_causal", False)
        )
        Recorder.now.computed(
            int(count(*args, **kwargs, out_val=result)), given[0].dtype, bool(masked)
        )
    return result


@functools.cache
def _causal(func: Any) -> int | None:
    """The position of the argument that says whether attention is causal."""
    return next(
        (at for at, argument in enumerate(schema(func).arguments) if argument.name == "is_causal"),
        None,
    )


def _executed(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    given: Sequence[Tensor],
    there: torch.device | None,
) -> Any:
    manner, name = _manner(func)
    # FSDP2 makes an empty chunk for each rank beyond the rows
    if manner == _VIEW or (name == "new_empty" and 0 in args[1]):
        return func(*args, **kwargs)
    device = kwargs.get("device")
    if device.type == "meta" if device is not None else any(one.is_meta for one in given):
        return func(*args, **kwargs)  # of the script's own meta tensors
    on_cuda = there is not None and there.type == "cuda"
    if name in _INDEXED and any(one is not None and one.dtype is torch.bool for one in args[1]):
        args = (args[0], unknown.places(args[1]), *args[2:])
        given = [*given, *(one for one in args[1] if one is not None)]
        if on_cuda:
            unknown.note("indexing with a boolean mask")
    if on_cuda and unknown.sized(name, kwargs):
        unknown.note(name)
    hidden = any(is_hollow(one) for one in given)
    if manner == _NUMBER:
        if on_cuda:
            unknown.note(name)
        return unknown.number(name, func, args, kwargs, given) if hidden else func(*args, **kwargs)
    if manner == _IN_PLACE:
        if not hidden:
            return func(*args, **kwargs)
        if not name.startswith(("_foreach_", "_fused_")):
            _on_shapes(func, args, kwargs)  # raises what a wrong shape raises
        return _changed(func, args, kwargs)
    if not hidden and not on_cuda and given:
        return func(*args, **kwargs)
    if hidden and (known := unknown.RESULTS.get(name)) is not None:
        result = known(*args, **kwargs)
        if result is not NotImplemented:
            return result
    return _new(func, args, kwargs, hidden, on_cuda, bool(given))


def _new(func: Any, args: Any, kwargs: Any, hidden: bool, on_cuda: bool, has_inputs: bool) -> Any:
    """A result in memory of its own: hollow if its values are unknown, or if it is large."""
    try:
        shapes = _on_shapes(func, args, kwargs)
    except (NotImplementedError, RuntimeError):
        if hidden:
            raise
        return func(*args, **kwargs)  # only its values give its shape
    results = [shapes] if isinstance(shapes, Tensor) else shapes
    if not hidden:
        tensors = (
            [one for one in results if isinstance(one, Tensor)]
            if isinstance(results, list | tuple)
            else []
        )
        if not any(_unknown(one, on_cuda) for one in tensors):
            return func(*args, **kwargs)
    return tree_map_only(Tensor, functools.partial(_made, _manner(func)[1]), shapes)


def _made(name: str, shape: Tensor) -> Tensor:
    """A hollow tensor; in the place of a single number a stand-in, with which the script goes
    on.
    """
    if shape.numel() == 1:
        return unknown.single(name, shape)
    return hollow(shape.size(), shape.stride(), shape.dtype)


def _unknown(shape: Tensor, on_cuda: bool) -> bool:
    size = shape.numel() * shape.element_size()
    if shape.is_floating_point() or shape.is_complex():
        return size > (shape.element_size() if on_cuda else LARGEST)
    return size > LARGEST_WHOLE


def _on_shapes(func: Any, args: Any, kwargs: Any) -> Any:
    """The result on meta tensors; the layers of a model, and its steps, ask for the same ones."""
    try:
        key = func, _key(args), _key(tuple(kwargs.items()))
        known = _RESULTS.get(key)
    except TypeError:  # an argument that cannot be hashed
        return _computed(func, args, kwargs)
    if known is None:
        if len(_RESULTS) >= _MOST_RESULTS:
            _RESULTS.clear()
        known = _RESULTS[key] = _computed(func, args, kwargs)
    return known


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.size(), value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return value.__class__, value


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = tree_map_only(Tensor, _as_shape, (args, kwargs))
    if kwargs.get("device") is not None or _takes_device(func):
        kwargs["device"] = _META
    kwargs.pop("pin_memory", None)
    if kwargs.get("generator") is not None:
        kwargs["generator"] = None
    return func(*args, **kwargs)


def _as_shape(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else shape_of(tensor)


def _changed(func: Any, args: Any, kwargs: Any) -> Any:
    """The arguments that an operator in place returns."""
    found = []
    for position, argument in enumerate(schema(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[position] if position < len(args) else kwargs.get(argument.name))
    Recorder.now.changed(found)
    returns = len(schema(func).returns)
    return None if returns == 0 else found[0] if returns == 1 else tuple(found[:returns])


@functools.cache
def _takes_device(func: Any) -> bool:
    """Whether it makes tensors of no inputs."""
    arguments = schema(func).arguments
    return any(a.name == "device" for a in arguments) and not any(
        "Tensor" in str(a.type) for a in arguments
    )


@functools.cache
def _manner(func: Any) -> tuple[str, str]:
    known = schema(func)
    name = known.name.partition("::")[2]
    if name in _SHAPES:
        return _VIEW, name
    aliases = [a.alias_info for a in known.arguments if a.alias_info is not None]
    if any(one.is_write for one in aliases):
        return _IN_PLACE, name
    if aliases and any(r.alias_info is not None for r in known.returns):
        return _VIEW, name
    if not any("Tensor" in str(r.type) for r in known.returns):
        return _NUMBER, name
    return _NEW, name
