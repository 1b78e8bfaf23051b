"""The only writer: results on stdout, logs on stderr."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, TextIO

from ..verifier.report.sanitize import sanitize

LINES, CHARACTERS = 150, 8_000  # of an error; what agents read of one command's output


class Help(argparse.RawDescriptionHelpFormatter):
    """Help as wide as COLUMNS says; argparse itself imports half a dozen modules to ask the terminal."""

    def __init__(self, prog: str) -> None:
        width = os.environ.get("COLUMNS", "")
        super().__init__(prog, width=int(width) - 2 if width.isdigit() else 118)


def say(text: str) -> None:
    """Write a result line to stdout."""
    _print(text, sys.stdout)


def log(text: str) -> None:
    """Write progress or a warning to stderr; what it quotes commands no CI system."""
    _print(sanitize(text), sys.stderr)


def bounded(text: str) -> str:
    """An error of at most LINES lines and CHARACTERS characters: what quotes its input can be as long as that."""
    cut = "\n".join(text[:CHARACTERS].split("\n")[:LINES])
    return text if cut == text else f"{cut} ... (cut)"


def _print(text: str, stream: TextIO) -> None:
    """Print; what the terminal's encoding does not have is shown as `\\u2713`."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


def emit_json(value: Any) -> None:
    """Write one JSON document to stdout."""
    import json

    say(json.dumps(value, indent=2))
