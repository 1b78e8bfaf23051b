"""`os._exit`, which ends the rank without exceptions or exit handlers."""

from ...trace.events import End
from ..dispatcher import Call
from ..session import Session


def install(session: Session) -> None:
    def before(call: Call) -> None:
        session.write(
            End(how="os._exit", code=call.given(0, "status", 0), frames=session.frames.stack())
        )

    session.around("os:_exit", before=before)
