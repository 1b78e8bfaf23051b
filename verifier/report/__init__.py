"""One verdict, several pure renderers; each is imported when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

# a command that only needs `sanitize`, such as `fsdp2 spec`, does not import the records
if TYPE_CHECKING:
    from ..verdict import Verdict

Renderer = Callable[["Verdict"], str]
_MODULES = {name: name for name in ("text", "html", "junit", "sarif", "github")} | {
    "json": "json_report"
}


def renderers(lint: bool = False, verbose: bool = False) -> dict[str, Renderer]:
    """{format: renderer} for `fsdp2 verify` or `fsdp2 lint`; `verbose`: the text lists what passed,
    too.
    """

    def renderer(name: str) -> Renderer:
        def render(verdict: Verdict) -> str:
            module = import_module(f".{_MODULES[name]}", __package__)
            if name != "text":
                return str(module.render(verdict))
            return str((module.render_lint if lint else module.render)(verdict, verbose))

        return render

    return {name: renderer(name) for name in _MODULES}


RENDERERS, LINT = renderers(), renderers(lint=True)
