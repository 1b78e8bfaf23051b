"""`Module.to_empty`: memory that nothing has written, marked so that what nobody initialises shows."""

from __future__ import annotations

import torch

from ...trace.events import ToEmpty
from ..compat.tensors import local
from ..dispatcher import Call
from ..session import Session

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def install(session: Session) -> None:
    """Record each `to_empty`; where the request says so, fill what it allocates."""

    def after(call: Call) -> None:
        session.write(ToEmpty(at_line=session.here()))
        if session.request["fill"]:
            with torch.no_grad():
                _fill(session, call.args[0])

    session.dispatcher.around("torch.nn:Module.to_empty", after=after)


def _fill(session: Session, module: torch.nn.Module) -> None:
    for tensor in [*module.parameters(), *module.buffers()]:
        part = local(tensor)
        session.filled.add(id(tensor))
        if part.is_floating_point():
            part.fill_(float("nan"))
        elif part.dtype in _INTEGERS:
            part.fill_(torch.iinfo(part.dtype).min)


def unset(session: Session, tensor: torch.Tensor) -> int:
    """Elements that still hold what `to_empty` left, of a tensor that it allocated (0: all were written)."""
    if not session.filled:
        return 0
    part = local(tensor)
    if part.is_floating_point():
        return int(part.isnan().sum())
    return int((part == torch.iinfo(part.dtype).min).sum()) if part.dtype in _INTEGERS else 0
