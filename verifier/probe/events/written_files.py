"""Files that a rank writes with `torch.save` or safetensors: whether they hold tensors."""

from collections.abc import Mapping

import torch

from ...trace.events import WrittenFile
from ..dispatcher import Call
from ..save_contents import leaves, place_of
from ..session import Session


def install(session: Session) -> None:
    """Subscribe to what writes."""

    def writes(call: Call) -> None:
        given, target = call.args[0] if call.args else None, _target(call)
        line = session.here()
        if not isinstance(given, Mapping) or not target or line is None:
            return
        values = [value for _, value in leaves(given)]
        session.write(
            WrittenFile(
                to=target,
                after_step=session.progress.made(),
                values=len(values),
                tensors=sum(isinstance(value, torch.Tensor) for value in values),
                at_line=line,
            )
        )

    session.around("torch:save", before=writes)
    session.around("safetensors.torch:save_file", before=writes, optional=True)


def _target(call: Call) -> str:
    """The absolute path of the file; "" if it is none."""
    return place_of(call.given(1, "f", call.kwargs.get("filename")))
