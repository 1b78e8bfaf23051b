"""One verdict, several pure renderers."""

from __future__ import annotations

from collections.abc import Callable

from ..finding import Verdict
from . import json_report, text

RENDERERS: dict[str, Callable[[Verdict], str]] = {"text": text.render, "json": json_report.render}
