"""`Module.to_empty`: uninitialised memory, filled with a mark that shows what the script does not initialise."""

import torch

from ...trace.events import ToEmpty
from ..compat.tensors import local
from ..dispatcher import Call
from ..session import Session

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def install(session: Session) -> None:
    """Record each `to_empty`; if the request says so, fill what it allocates."""

    def after(call: Call) -> None:
        session.write(ToEmpty(at_line=session.here()))
        if not session.request["fill"]:
            return
        with torch.no_grad():
            for tensor in [*call.args[0].parameters(), *call.args[0].buffers()]:
                part = local(tensor)
                session.filled.add(id(tensor))
                if part.is_floating_point():
                    part.fill_(float("nan"))
                elif part.dtype in _INTEGERS:
                    part.fill_(torch.iinfo(part.dtype).min)

    session.around("torch.nn:Module.to_empty", after=after)


def unset(session: Session, tensor: torch.Tensor) -> int:
    """Elements that still hold the mark of `to_empty` (0: all were written)."""
    part = local(tensor)
    if session.filled and part.is_floating_point():
        return int(part.isnan().sum())
    return int((part == torch.iinfo(part.dtype).min).sum()) if session.filled and part.dtype in _INTEGERS else 0
