"""In the process that manages a run: move into the run's world, with all that this process will
start.
"""

from __future__ import annotations

import os

from . import overlay, write_supervisor
from .world import NONE, OVERLAY, World


def enter(world: World, folder: str) -> None:
    """From now on nothing that this process or its children write reaches the user's files.

    `folder`: of the run.

    Where writes are supervised the caller goes on in a forked child. Raises OSError where the
    world cannot be had.
    """
    places: dict[str, bool] = {}
    if world.mechanism == OVERLAY:
        places = overlay.enter(world)
    os.environ.update(world.environment)
    if world.mechanism not in (OVERLAY, NONE) or not all(places.values()):
        write_supervisor.supervised(write_supervisor.Paths(world, places), folder)
