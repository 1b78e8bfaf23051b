"""The place of a finding for CI systems: a path from the root of the checkout."""

import os

from ..config.commands import explain
from ..finding import Finding
from ..trace.events import Line, Place
from ..verdict import Verdict


def root() -> str:
    """The checkout's folder: what GitHub calls the workspace if we are below it, else the current
    folder.
    """
    here = os.getcwd()  # noqa: PTH109
    workspace = os.environ.get("GITHUB_WORKSPACE", "")
    inside = workspace.startswith("/") and f"{os.path.realpath(here)}/".startswith(
        f"{os.path.realpath(workspace)}/"
    )
    return workspace if inside else here


def relative(file: str) -> str | None:
    """The path from the root, with `/`; None for a file that lies elsewhere."""
    path = os.path.relpath(file or ".", root())
    if path.startswith(".."):
        path = os.path.relpath(os.path.realpath(file), os.path.realpath(root()))
    return None if path.startswith("..") else path.replace(os.sep, "/")


def shortest(file: str) -> str:
    """The path, or that relative to the current folder if it is shorter."""
    return min(file, os.path.relpath(file), key=len)


def place_of(finding: Finding, verdict: Verdict) -> Place:
    """The finding's location, or the first line of the script."""
    script = str(verdict.target["script"])
    return finding.location or Place(file=script, line=1, function="", code="")


def where(location: Line) -> str:
    """`path:line in function`."""
    file = location.file
    function = f" in {location.function}" if location.function else ""
    return f"{relative(file) or file}:{location.line}{function}"


def steps_to(location: Place | None) -> list[tuple[str, Line]]:
    """("at", the line of a finding), ("through", those on the way), where it is a library's
    ("from", the user's line), and ("called from", lines of the user's other files).
    """
    if location is None:
        return []
    through = [("through", line) for line in location.through]
    steps: list[tuple[str, Line]] = [("at", location.library or location), *through]
    return [
        *steps,
        *([("from", location)] if location.library else []),
        *(("called from", line) for line in location.callers),
    ]


def lines_of(finding: Finding, *numbers: str) -> list[str]:
    """A finding for a reader: its evidence, the `numbers`, its place and code, its fix, the command
    that explains its rule.
    """
    lines = [finding.evidence, *numbers]
    for word, location in steps_to(finding.location):
        lines += [f"{word} {where(location)}", f"    {location.code}"]
    return [
        *lines,
        *([f"fix: {finding.fix}"] if finding.fix else []),
        explain(finding.rule),
    ]
