"""How results are stored: JSON with one row a line, so that a diff of two measurements shows the
rows that changed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write(path: Path, results: Any) -> None:
    """Store `results` as a summary that is committed, or as details below build/."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text(results) + "\n", encoding="utf-8")


def with_section(page: str, lines: list[str]) -> str:
    """The text of a page with one of its sections made again; the first line is its heading."""
    before, _, rest = page.partition(lines[0] + "\n")
    return before + "\n".join(lines) + "\n" + rest[rest.index("\n## ") + 1 :]


def text(value: Any, indent: int = 0) -> str:
    """JSON in which a list of two rows or more, and what holds one, has a line for each item; all
    else is on one line.
    """
    if indent and not _has_rows(value):
        return json.dumps(value, ensure_ascii=False)
    pad, end = "\n" + " " * (indent + 1), "\n" + " " * indent
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {text(item, indent + 1)}" for key, item in value.items()]
        return "{" + pad + f",{pad}".join(items) + end + "}"
    return "[" + pad + f",{pad}".join(text(item, indent + 1) for item in value) + end + "]"


def _has_rows(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) > 1 and all(isinstance(item, dict | list) for item in value)
    items = value.values() if isinstance(value, dict) else ()
    return any(isinstance(item, list) and _has_rows(item) for item in items) or (
        len(items) > 1 and all(isinstance(item, dict) for item in items)
    )
