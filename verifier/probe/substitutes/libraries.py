"""Libraries that shard for the script, but only where there are accelerators.

| library | what it does on the CPU | what is done about it |
|---|---|---|
| accelerate | drops its FSDP plugin in silence, trains with DDP | its state says that there are accelerators; the device stays CPU |

The library's own sharding code then runs as it does in production. What was done is recorded (`adapted`).
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from ...trace.events import Adapted
from ..dispatcher import Report
from ..session import Session


def install(session: Session) -> None:
    """Adapt each library when the script imports it."""
    adapters: dict[str, Callable[[Any], None]] = {"accelerate.state": functools.partial(_accelerate, session)}
    sys.meta_path.insert(0, _AfterImport(adapters, session.report))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls an adapter on a module as soon as it has been executed."""

    def __init__(self, adapters: dict[str, Callable[[Any], None]], report: Report) -> None:
        self._adapters = adapters
        self._report = report

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        adapt = self._adapters.pop(name, None)
        spec = importlib.machinery.PathFinder.find_spec(name, path) if adapt is not None else None
        if adapt is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            try:
                adapt(module)
            except Exception as error:
                self._report(module.__name__, error)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


def _accelerate(session: Session, state: Any) -> None:
    """accelerate applies FSDP only if its process state says that there are several accelerators."""
    try:
        partial, whole, kinds = state.PartialState, state.AcceleratorState, state.DistributedType
        initialise = whole.__init__
    except AttributeError:
        return

    @functools.wraps(initialise)
    def initialised(self: Any, mixed_precision: Any = None, cpu: bool = False, *args: Any, **kwargs: Any) -> None:
        asked = kwargs.get("fsdp_plugin") is not None or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
        if asked and not whole._shared_state:
            own = {key: value for key, value in kwargs.items() if key in ("backend", "timeout", "init_method")}
            partial(cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"), **own)
            if partial._shared_state.get("distributed_type") == kinds.MULTI_CPU:
                partial._shared_state["distributed_type"] = kinds.MULTI_GPU
                what = "accelerate drops its FSDP plugin on the CPU; it was told that the ranks have accelerators"
                session.write(Adapted(told=what))
        initialise(self, mixed_precision, cpu, *args, **kwargs)

    whole.__init__ = initialised
