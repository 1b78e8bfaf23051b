"""Queries on the sources that several detectors on devices use."""

from __future__ import annotations

from .events import Event, Flow
from .values import choices


def process_groups(flow: Flow) -> list[Event]:
    return flow.ops("dist.init_process_group")


def is_nccl(event: Event) -> bool:
    """Whether a process group is made with NCCL alone, whatever branch is taken."""
    backend = event.arg(0, "backend")
    return backend is not None and all(one.kind == "const" and one.const == "nccl" for one in choices(backend))
