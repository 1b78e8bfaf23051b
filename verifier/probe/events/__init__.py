"""What happens in a rank, one topic a file: each subscribes to functions of torch and to notices, and writes events.

A topic is a module with a function `install(session)`, found by being there.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

# Subscribers are called in the order of their topics. That matters for these; all others come in between, by name.
FIRST = (
    "progress",  # logs what the script calls before anything else looks at it
    "traffic",
    "flight",
    "checkpoints",
    "templates",
    "sharding",
    "optimizers",
    "groups",
    "wrapping",
    "calls",  # after what asks how deep in calls we are
)
LAST = ("stress", "memory")


def topics() -> Iterator[Callable[[Any], None]]:
    """What installs each topic, in order."""
    there = {found.name for found in pkgutil.iter_modules(__path__)}
    for name in (*FIRST, *sorted(there - {*FIRST, *LAST}), *LAST):
        install = getattr(import_module(f".{name}", __name__), "install", None)
        if install is not None:
            yield install
