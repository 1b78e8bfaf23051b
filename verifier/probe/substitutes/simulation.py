"""One process that takes itself for rank 0 of many: torch's fake process group stands in for every backend.

A fake collective returns at once and gives back this rank's own values, so structure and traffic are those of the asked world
size and the numbers are not. No socket is opened. What reads or writes checkpoints is left out: its collectives move objects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..compat.names import FAKE_STORE, need
from ..dispatcher import Call
from ..session import Session


def install(session: Session) -> None:
    """From now on this process is rank 0 of `request["world_size"]` ranks that do not exist."""

    fake = need(FAKE_STORE)

    def started(call: Call, proceed: Callable[[], Any]) -> Any:
        world = session.request["world_size"]
        call.args, call.kwargs = ("fake",), {"rank": 0, "world_size": world, "store": fake()}
        return proceed()

    def grouped(call: Call, proceed: Callable[[], Any]) -> Any:
        call.args, call.kwargs = call.args[:2], {**call.kwargs, "backend": "fake"}
        return proceed()

    around = session.dispatcher.around
    around("torch.distributed:init_process_group", replace=started)
    around("torch.distributed:new_group", replace=grouped)
    around("torch.distributed:monitored_barrier", replace=_nothing)
    for name in ("save", "async_save", "load"):
        around(f"torch.distributed.checkpoint:{name}", replace=_nothing)
    for place in (dist, distributed_c10d):
        place.TCPStore = _OwnStore  # type: ignore[attr-defined]


class _OwnStore(dist.HashStore):  # type: ignore[name-defined, misc]
    """In place of a TCPStore, which would wait for a server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


def _nothing(call: Call, proceed: Callable[[], Any]) -> None:
    """What moves objects between ranks has none to move them to."""
