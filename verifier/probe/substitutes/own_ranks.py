"""A script that starts its ranks itself, with `torch.multiprocessing.spawn`: each of our ranks is
one of them.

It then meets the others where ours do, not at the port that it has chosen: runs that go on at the
same time would share that.
"""

import os
from types import SimpleNamespace
from typing import Any

from ..dispatcher import Call
from ..session import Session

_MEETING = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
_DONE = SimpleNamespace(join=lambda *args, **kwargs: True, processes=[], pids=list)


class AnotherNumberOfRanks(RuntimeError):
    """The script starts more or fewer ranks than there are; reports know it by its name."""


class OwnRanks:
    """Of one rank: whether the script has started its ranks, and where ours meet."""

    def __init__(self, session: Session) -> None:
        self.rank = session.rank
        self.world = session.request.world_size
        self.meeting = {name: os.environ[name] for name in _MEETING if name in os.environ}
        self.begun = False

    def spawned(self, call: Call, proceed: Any) -> Any:
        """`spawn(fn, args=(), nprocs=1, join=True, ...)`: the rank's own part, in this process.

        Raises AnotherNumberOfRanks where the script starts more or fewer.
        """
        number = call.given(2, "nprocs")
        number = 1 if number is None else int(number)
        if number == 0:  # one for each GPU, of which there is none
            return _DONE
        if number != self.world:
            raise AnotherNumberOfRanks(
                f"the script starts {number} ranks itself, and there are {self.world}: give"
                f" --nproc {number}"
            )
        self.begun = True
        call.given(0, "fn")(self.rank, *(call.given(1, "args") or ()))
        return _DONE

    def meets(self, call: Call) -> None:
        """`init_process_group` of a script that has started its ranks."""
        if not self.begun:
            return
        os.environ.update(self.meeting)
        if call.given(1, "init_method") is not None:
            call.kwargs["init_method"] = "env://"
            call.args = call.args[:1]
        if call.kwargs.get("store") is not None:
            del call.kwargs["store"]


def install(session: Session) -> None:
    """Take the place of `spawn`."""
    own = OwnRanks(session)
    for name in ("spawn", "start_processes"):
        session.around(f"torch.multiprocessing:{name}", replace=own.spawned, optional=True)
    session.around("torch.distributed:init_process_group", before=own.meets)
