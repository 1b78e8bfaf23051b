"""Gradients that FSDP keeps unreduced."""

from __future__ import annotations

from ...trace import Run
from ...trace.events import Step, Sync, Zeroed


def synced_always(run: Run) -> str:
    """Why rules on unreduced gradients do not apply; "" if the script sets the flag or such gradients were seen."""
    for trace in run.traces:
        if trace.first(Sync) or trace.first(Zeroed) or any(record.unsynced for record in trace.of(Step)):
            return ""
    return "the script never sets `set_requires_gradient_sync`: every backward reduces"
