"""Libraries that shard for the script, but only on accelerators.

| library | on the CPU | what the probe changes | |---|---|---| | accelerate | drops its FSDP plugin
without a message and trains with DDP | its state reports accelerators; the device stays CPU |

The library's own sharding code then runs as it does in production. The change is recorded
(`adapted`).
"""

import functools
import os
from types import ModuleType
from typing import Any

from ...trace.events import Adapted
from ..imports import after_import
from ..session import Session


def install(session: Session) -> None:
    """Adapt each library when the script imports it."""

    def adapt(module: ModuleType) -> None:
        try:
            _accelerate(session, module)
        except Exception as error:
            session.report(module.__name__, error)

    after_import("accelerate.state", adapt)


def _accelerate(session: Session, state: Any) -> None:
    """accelerate applies FSDP only if its process state reports several accelerators."""
    try:
        partial, whole, kinds = state.PartialState, state.AcceleratorState, state.DistributedType
        initialise = whole.__init__
    except AttributeError:
        return

    @functools.wraps(initialise)
    def initialised(
        self: Any, mixed_precision: Any = None, cpu: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        asked = (
            kwargs.get("fsdp_plugin") is not None
            or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
        )
        if asked and not whole._shared_state:
            own = {
                key: value
                for key, value in kwargs.items()
                if key in ("backend", "timeout", "init_method")
            }
            partial(
                cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"),
                **own,
            )
            if partial._shared_state.get("distributed_type") == kinds.MULTI_CPU:
                partial._shared_state["distributed_type"] = kinds.MULTI_GPU
                what = (
                    "accelerate drops its FSDP plugin on the CPU; the verifier set its state to"
                    " `MULTI_GPU` so that it shards"
                )
                session.write(Adapted(text=what))
        initialise(self, mixed_precision, cpu, *args, **kwargs)

    whole.__init__ = initialised
