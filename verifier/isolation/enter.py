"""In the process that manages a run: move into the run's world, with all that this process will start."""

from __future__ import annotations

import os
from collections.abc import Sequence

from . import guard, overlay
from .world import NONE, OVERLAY, World


def enter(world: World, folder: str) -> None:
    """From now on nothing that this process or its children write reaches the user's files. `folder`: of the run.

    With a guard the caller goes on in a forked child. Raises OSError where the world cannot be had.
    """
    uncovered: Sequence[str] = ()
    if world.mechanism == OVERLAY:
        uncovered = overlay.enter(world)
    os.environ.update(world.environment)
    if world.mechanism not in (OVERLAY, NONE) or uncovered:
        guard.supervised(guard.Paths(world, uncovered), folder)
