"""The only writer: results on stdout, logs on stderr."""

from __future__ import annotations

import sys
from typing import Any


def say(text: str) -> None:
    """Write a result line to stdout."""
    print(text, flush=True)


def log(text: str) -> None:
    """Write progress or a warning to stderr."""
    print(text, file=sys.stderr, flush=True)


def emit_json(value: Any) -> None:
    """Write one JSON document to stdout."""
    import json

    say(json.dumps(value, indent=2))
