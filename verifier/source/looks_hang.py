"""Queries on the sources that several detectors on hangs use."""

from __future__ import annotations

from .events import Guard
from .looks import text


def said(guard: Guard) -> str:
    test = text(getattr(guard.node, "test", guard.node), 40)
    return f"`{test}`" if guard.branch else f"`not ({test})`"
