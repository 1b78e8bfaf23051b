"""Simulates rank 0 of many in one process: torch's fake process group replaces every backend.

A fake collective returns at once with this rank's own values, so structure and traffic are those of
the requested world size and the numbers are not. No socket is opened. Checkpoint functions do
nothing: their collectives move objects.
"""

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..compat.names import FAKE_STORE, need
from ..dispatcher import Call
from ..session import Session

# torch counts the ranks of each new group in a store, where the others never come
_BARRIER = "TORCH_DIST_INIT_BARRIER"


def install(session: Session) -> None:
    """Make this process rank 0 of `request.world_size` simulated ranks."""
    fake = need(FAKE_STORE)

    def started(call: Call, proceed: Callable[[], Any]) -> Any:
        os.environ.pop(_BARRIER, None)
        world = session.request.world_size
        call.args, call.kwargs = ("fake",), {"rank": 0, "world_size": world, "store": fake()}
        return proceed()

    def grouped(call: Call, proceed: Callable[[], Any]) -> Any:
        os.environ.pop(_BARRIER, None)
        call.args, call.kwargs = call.args[:2], {**call.kwargs, "backend": "fake"}
        return proceed()

    session.around("torch.distributed:init_process_group", replace=started)
    session.around("torch.distributed:new_group", replace=grouped)
    for name in (
        ":monitored_barrier",
        ".checkpoint:save",
        ".checkpoint:async_save",
        ".checkpoint:load",
    ):
        session.around(f"torch.distributed{name}", replace=lambda call, proceed: None)
    for place in (dist, distributed_c10d):
        place.TCPStore = _OwnStore  # type: ignore[attr-defined]


class _OwnStore(dist.HashStore):  # type: ignore[name-defined, misc]
    """Replaces TCPStore, which would wait for a server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
