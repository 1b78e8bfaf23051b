"""One verdict, several pure renderers; each is imported when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # who only needs `sanitize`, such as `fsdp2 spec`, need not wait for the records
    from ..verdict import Verdict

Renderer = Callable[["Verdict"], str]


def _in(module: str) -> Renderer:
    """`render` of a module beside this file."""

    def render(verdict: Verdict) -> str:
        text: str = import_module(f".{module}", __package__).render(verdict)
        return text

    return render


RENDERERS: dict[str, Renderer] = {
    "text": _in("text"),
    "json": _in("json_report"),
    "html": _in("html"),
    "junit": _in("junit"),
    "sarif": _in("sarif"),
    "github": _in("github"),
}
LINT: dict[str, Renderer] = {**RENDERERS, "text": _in("lint_text")}
