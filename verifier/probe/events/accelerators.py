"""Whether the script itself asks which accelerators there are: one that finds too few may end
without an error.
"""

from ...trace.events import AsksForAccelerators
from ..dispatcher import Call
from ..frames import caller
from ..session import Session

_QUESTIONS = ("is_available", "device_count", "current_accelerator")


def install(session: Session) -> None:
    def before(call: Call) -> None:
        if session.frames.owns(caller().f_code.co_filename) and session.first(AsksForAccelerators):
            session.write(AsksForAccelerators(at_line=session.here()))

    for module in ("torch.cuda", "torch.accelerator"):
        for name in _QUESTIONS:
            session.around(f"{module}:{name}", before=before, optional=True)
