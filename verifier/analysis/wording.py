"""Names and numbers in sentences."""

from collections.abc import Iterable

ROOM = 80  # characters of names in a sentence


def some(names: Iterable[str], limit: int = 3) -> str:
    """`a, b, c and 5 more`; fewer names, but one, if they are long."""
    items = list(names)
    kept = items[:limit]
    while len(", ".join(kept)) > ROOM and len(kept) > 1:
        kept.pop()
    more = f" and {len(items) - len(kept)} more" if len(items) > len(kept) else ""
    return ", ".join(kept) + more


def cut(text: str, most: int) -> str:
    """The text, or its first words and ` ...`; a long last word is cut, too."""
    return (
        text if len(text) <= most else f"{text[: max(text.rfind(' ', 0, most - 3), most - 24)]} ..."
    )


def count(number: int, thing: str) -> str:
    """`1 parameter`, `3 parameters`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
