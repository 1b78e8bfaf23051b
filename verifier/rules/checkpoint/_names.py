"""Names of parameters in checkpoints."""

from __future__ import annotations

from ...trace import Run


def parameter_of(run: Run, key: str) -> str | None:
    """The model's parameter whose name a key is, or ends with."""
    parts = key.split(".")
    return next((name for n in range(len(parts)) if (name := ".".join(parts[n:])) in run.parameters), None)
