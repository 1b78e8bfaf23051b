"""Where an error of the script was raised: for each frame its module or optimizer, and whether its
weights were shards.
"""

import traceback
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
from ..measures import dtype_name, short_name
from ..probe_errors import ProbeErrors

_FRAMES = 80
_NAMES = 12


def note(writer: Writer, frames: Frames, error: BaseException) -> None:
    """Record the frames of `error`, innermost first, each with its `self`. Never raises."""
    try:
        own = {(place.file, place.line, place.function) for place in frames.stack(error)}
        found: list[RaisedFrame] = []
        objects: list[Any] = []
        for frame, line in traceback.walk_tb(error.__traceback__):
            file, function = frame.f_code.co_filename, frame.f_code.co_name
            known = _owner(frame, objects)
            found.append(
                RaisedFrame(
                    file=file,
                    line=line,
                    function=function,
                    own=(file, line, function) in own,
                    **known,
                )
            )
        writer.write(Raised(frames=found[::-1][:_FRAMES]))
    except Exception as own_error:
        ProbeErrors(writer).report("raised.note", own_error)


def _owner(frame: FrameType, objects: list[Any]) -> dict[str, Any]:
    """The frame's `self`; of a module its class, its number, how many of its weights are shards
    now.
    """
    me = frame.f_locals.get("self")
    if isinstance(me, torch.optim.Optimizer):
        return {"optimizer": type(me).__name__}
    if not isinstance(me, nn.Module):
        return {}
    if all(me is not seen for seen in objects):
        objects.append(me)
    return {
        "module": short_name(me),
        "number": next(k for k, seen in enumerate(objects) if seen is me),
        "fsdp": isinstance(me, FSDPModule),
        "shards": sum(isinstance(p, DTensor) for p in own_parameters(me).values()),
        "shards_below": sum(isinstance(p, DTensor) for p in me.parameters()),
        "tensors": _dtypes(frame.f_locals),
        "buffers": _dtypes(own_buffers(me)),
    }


def _dtypes(named: Mapping[str, Any]) -> dict[str, str]:
    """{name: dtype} of the first floating-point tensors in `named`."""
    floating = [
        (n, t) for n, t in named.items() if isinstance(t, torch.Tensor) and t.is_floating_point()
    ]
    return {name: dtype_name(tensor.dtype) for name, tensor in floating[:_NAMES]}
