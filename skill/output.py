"""The only writer: results on stdout, logs on stderr."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any


class Help(argparse.RawDescriptionHelpFormatter):
    """Help as wide as COLUMNS says; argparse itself imports half a dozen modules to ask the terminal."""

    def __init__(self, prog: str) -> None:
        width = os.environ.get("COLUMNS", "")
        super().__init__(prog, width=int(width) - 2 if width.isdigit() else 118)


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
