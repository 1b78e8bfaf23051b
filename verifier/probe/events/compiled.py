"""What the training compiles, in every run: not what a file compiles for itself as it is imported,
such as its kernels.
"""

from torch import nn

from ...trace.events import Compiled
from ..dispatcher import Call
from ..session import Session

_MOST = 64  # calls that are recorded of a rank


def install(session: Session) -> None:
    """`nn.Module.compile` calls `torch.compile` with a method of the module."""

    def compiling(call: Call) -> None:
        what = call.given(0, "model")
        # the outermost is the script
        importing = any(one.function == "<module>" for one in session.frames.stack()[:-1])
        if what is not None and not importing and session.first("compile", _MOST):
            module = isinstance(getattr(what, "__self__", what), nn.Module)
            session.write(Compiled(module=module, at_line=session.here()))

    session.around("torch:compile", before=compiling)
