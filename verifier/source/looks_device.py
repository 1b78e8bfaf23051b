"""What several detectors on device ask of the sources."""

from __future__ import annotations

from .events import Event, Flow
from .values import Value, choices


def process_groups(flow: Flow) -> list[Event]:
    return flow.ops("dist.init_process_group")


def _backend(event: Event) -> Value | None:
    return event.arg(0, "backend")


def is_nccl(event: Event) -> bool:
    """Whether a process group is made with NCCL alone, whatever branch is taken."""
    backend = _backend(event)
    return backend is not None and all(one.kind == "const" and one.const == "nccl" for one in choices(backend))
