"""Asynchronous saves in flight, and the collectives that the script calls meanwhile."""

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import torch.distributed as dist

from ...trace.events import Place, SaveInFlight
from ..compat.tensors import mesh_groups
from ..dispatcher import Call
from ..session import Session

_COLLECTIVES = (
    "barrier",
    "all_reduce",
    "broadcast",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
)
# A stopped run waits for its asynchronous save: runs that resume would read half of it.
SAVES = 120.0  # seconds that a run which has made its steps waits for them


class Flight:
    """The asynchronous saves of one rank that have not ended."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.watch: bool = session.request.watch_saves
        # future, process group, line of the save
        self.pending: list[tuple[Any, Any, Place | None]] = []
        self.uploads: list[Future[Any]] = []  # of all saves

    def started(self, result: Any, group: Any) -> None:
        """An asynchronous save has started, with collectives on `group`."""
        upload = getattr(result, "upload_completion", result)
        if isinstance(upload, Future):
            self.uploads.append(upload)
        own = group if group is not None else dist.group.WORLD
        if self.watch and own is not None and dist.is_initialized():
            self.pending.append((upload, own, self.session.here()))

    def stopped(self) -> None:
        """The run ends here, the script would go on: runs that resume read what it is writing.

        The process of a save may start slowly.
        """
        wait(self.uploads, SAVES)

    def collective(self, groups: Callable[[], list[Any]], what: str) -> None:
        """The main thread is about to use these groups: is a save in flight on one of them?"""
        self.pending = [item for item in self.pending if not item[0].done()]
        if not self.pending or threading.current_thread() is not threading.main_thread():
            return
        used = groups()
        for item in [i for i in self.pending if any(g is i[1] for g in used)]:
            self.pending.remove(item)
            apart = len(_backends(item[1])) > 1
            self.session.write(
                SaveInFlight(
                    what=what, saved_line=item[2], apart=apart, at_line=self.session.here()
                )
            )


def install(session: Session) -> None:
    """Subscribe to collectives of the main thread, if saves are watched."""
    flight = session.one(Flight)
    session.subscribe("stop", flight.stopped)

    def called(call: Call) -> None:
        if flight.pending and session.progress.depth == 0:
            flight.collective(lambda: mesh_groups(call.args[0]), "a forward of the sharded model")

    def used(call: Call, name: str) -> None:
        if flight.pending:
            given = [
                v for v in (*call.args, *call.kwargs.values()) if isinstance(v, dist.ProcessGroup)
            ]
            flight.collective(lambda: given or [dist.group.WORLD], f"dist.{name}")

    if flight.watch:
        session.around("torch.nn:Module.__call__", before=called)
        for name in _COLLECTIVES:
            session.around(f"torch.distributed:{name}", before=functools.partial(used, name=name))


def _backends(group: Any) -> set[str]:
    """The backends of the device types of a group, as `cpu:gloo,cuda:nccl` names them."""
    try:
        return {part.partition(":")[2] for part in dist.get_backend_config(group).split(",")}
    except (RuntimeError, ValueError):
        return set()
