"""Names and numbers in sentences."""

from collections.abc import Iterable


def some(names: Iterable[str], limit: int = 3) -> str:
    """`a, b, c and 5 more`."""
    items = list(names)
    shown = ", ".join(items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"


def count(number: int, thing: str) -> str:
    """`1 parameter`, `3 parameters`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
