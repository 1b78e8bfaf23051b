"""One process that takes itself for rank 0 of many: torch's fake process group stands in for every backend.

A fake collective returns at once and gives back this rank's own values, so structure and traffic are those of the asked world
size and the numbers are not. No socket is opened. What reads or writes checkpoints is left out: its collectives move objects.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.device_mesh as device_mesh
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from .session import Session


def install(session: Session) -> None:
    """From now on this process is rank 0 of `request["world_size"]` ranks that do not exist."""
    start, group = dist.init_process_group, dist.new_group

    @functools.wraps(start)
    def started(*args: Any, **kwargs: Any) -> None:
        world = session.request["world_size"]
        start("fake", rank=0, world_size=world, store=FakeStore())

    @functools.wraps(group)
    def grouped(*args: Any, **kwargs: Any) -> Any:
        kwargs["backend"] = "fake"
        return group(*args[:2], **kwargs)

    for place in (dist, distributed_c10d, device_mesh):
        place.init_process_group = started  # type: ignore[attr-defined]
    for place in (dist, distributed_c10d):
        place.new_group = grouped  # type: ignore[attr-defined]
        place.TCPStore = _OwnStore  # type: ignore[attr-defined]
    dist.monitored_barrier = _nothing
    for name in ("save", "async_save", "load"):
        setattr(dcp, name, _nothing)


class _OwnStore(dist.HashStore):  # type: ignore[name-defined, misc]
    """In place of a TCPStore, which would wait for a server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


_nothing: Callable[..., None] = lambda *args, **kwargs: None  # noqa: E731
