"""Parameters beside the sharded ones whose gradients differ between ranks."""

from __future__ import annotations

from ...trace import Run
from ...trace.events import Late, Step

NOT_USED = "the script never called fully_shard"


def gradients_differ(run: Run, name: str) -> bool:
    """Whether at some step the ranks held different gradients of a plain parameter."""
    for step in range(1, run.steps() + 1):
        values = [r.grads_at_step.get(name) for r in run.at_step(Step, step)]
        if any(value != values[0] for value in values):
            return True
    return False


def late_parameters(run: Run) -> list[str]:
    """Parameters that were registered after their root was sharded."""
    return [name for record in run.places(Late) for name in record.names]
