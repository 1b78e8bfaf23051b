"""`fsdp2 convert`: the steps of `lint --migrate` that have one right answer, applied to a DDP or
FSDP1 script; the rest is marked.

It edits the syntax tree of libcst, which keeps comments and formatting, and looks up in the
followed script what each call does.
"""

from __future__ import annotations

from pathlib import Path

from .found import Converted, Todo, find
from .script import edited

__all__ = ["Converted", "Todo", "convert"]


def convert(path: Path) -> Converted:
    """The script at `path` with fully_shard. Raises UserError."""
    return edited(find(path))
