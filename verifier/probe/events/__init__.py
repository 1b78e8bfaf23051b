"""The events of a rank, one topic a file: each subscribes to functions of torch and to notices, and
writes events.

Every module here that has a function `install(session)` is a topic.
"""

import pkgutil
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

# Subscribers are called in the order of their topics. It matters for these; all others are in
# between, by name.
# "progress" logs a call before any other topic reads it; "calls" comes after the topics that ask
# for the depth of calls.
FIRST = (
    "progress",
    "traffic",
    "collective_log",
    "checkpoints",
    "state_dict_templates",
    "sharding",
    "optimizers",
    "groups",
    "wrapping",
    "calls",
)
# "skipped_steps" sees a step end after all others do: what follows it is recorded.
LAST = ("stress", "memory", "changed", "skipped_steps")


SURVEY = (
    "accelerators",
    "checkpoints",
    "compiled",
    "data",
    "last_collectives",
    "lora_merges",
    "overwritten",
    "progress",
    "random_stream",
    "schedules",
    "sharding",
    "survey",
    "batches",
    "accumulation",
    "ending",
    "written_files",
)
ENDING = ("checkpoints", "sharding", "ending")
CAPACITY = ("capacity",)
PLANNING = ("capacity", "capacity_as_cpu", "count")  # modes that record what a capacity plan needs


def topics(
    mode: str = "fsdp", ending: bool = False, structure: bool = False
) -> Iterator[Callable[[Any], None]]:
    """The `install` of each topic, in order.

    The survey run has its own, and so has the run of which only the ending counts.
    """
    there = {found.name for found in pkgutil.iter_modules(__path__)}
    there -= {"survey", "batches", "accumulation", "ending", "capacity"}
    all_steps = (*FIRST, *sorted(there - {*FIRST, *LAST}), *LAST)
    wanted: tuple[str, ...] = ENDING if ending else all_steps
    if mode == "survey":
        wanted = SURVEY
    elif mode in PLANNING:
        wanted = (*all_steps, *CAPACITY) if structure else CAPACITY
    for name in wanted:
        install = getattr(import_module(f".{name}", __name__), "install", None)
        if install is not None:
            yield install
