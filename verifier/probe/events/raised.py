"""What an error of the script came up in: for each frame the module or optimizer at work, and whether its weights were shards."""

from __future__ import annotations

from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ...trace.events import Raised, RaisedFrame
from ...trace.writer import Writer
from ..compat.tensors import own_buffers, own_parameters
from ..frames import Frames
from ..guard import Guard

_FRAMES = 80
_NAMES = 12


def note(writer: Writer, frames: Frames, error: BaseException) -> None:
    """Record the frames of `error`, innermost first, with what their `self` is. Never raises."""
    try:
        own = {(place.file, place.line, place.function) for place in frames.stack(error)}
        found: list[RaisedFrame] = []
        objects: list[Any] = []
        trace = error.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            at = (code.co_filename, trace.tb_lineno, code.co_name)
            found.append(
                RaisedFrame(file=at[0], line=at[1], function=at[2], own=at in own, **_owner(trace.tb_frame, objects))
            )
            trace = trace.tb_next
        writer.write(Raised(frames=found[::-1][:_FRAMES]))
    except Exception as own_error:
        Guard(writer).report("raised.note", own_error)


def _owner(frame: FrameType, objects: list[Any]) -> dict[str, Any]:
    """What the frame's `self` is; of a module its class, its number, how many of its weights are shards now."""
    me = frame.f_locals.get("self")
    if isinstance(me, torch.optim.Optimizer):
        return {"optimizer": type(me).__name__}
    if not isinstance(me, nn.Module):
        return {}
    if all(me is not seen for seen in objects):
        objects.append(me)
    local = _dtypes(frame.f_locals)
    buffers = _dtypes(own_buffers(me))
    return {
        "module": type(me).__name__.removeprefix("FSDP"),
        "number": next(k for k, seen in enumerate(objects) if seen is me),
        "fsdp": isinstance(me, FSDPModule),
        "shards": sum(isinstance(p, DTensor) for p in own_parameters(me).values()),
        "shards_below": sum(isinstance(p, DTensor) for p in me.parameters()),
        "tensors": dict(list(local.items())[:_NAMES]),
        "buffers": dict(list(buffers.items())[:_NAMES]),
    }


def _dtypes(named: Mapping[str, Any]) -> dict[str, str]:
    """{name: dtype} of the floating tensors among `named`."""
    floating = [(n, t) for n, t in named.items() if isinstance(t, torch.Tensor) and t.is_floating_point()]
    return {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in floating}
