"""When a run that shows nothing of a kind means that the script has nothing of it."""

from __future__ import annotations

from ..trace import Run


def absent(run: Run | None, seen: object, reason: str) -> str:
    """The reason why a rule does not apply, if a run that came to its end has shown nothing of the kind; "" otherwise."""
    return "" if seen or run is None or unfinished(run) else reason


def unfinished(run: Run) -> str:
    """Why a run might still have come to what it has not shown; "" if it came to its end."""
    if not run.completed:
        return f"the {run.role} run stopped before it came to anything of the kind (see run-completes)"
    return "" if run.steps() else f"the {run.role} run made no optimizer step"
