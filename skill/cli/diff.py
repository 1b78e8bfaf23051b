"""`fsdp2 diff`: what differs between a project and what its spec renders to."""

from __future__ import annotations

import argparse
import difflib
import shlex
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ...verifier.analysis.wording import count
from ...verifier.errors import FAIL, PASS
from ..output import add_command, emit_json, log, say
from .update import add_project_arguments, versions

if TYPE_CHECKING:
    from ..update.project import File

EXAMPLES = """\
examples:
  fsdp2 diff my-run                           your edits, and what the spec or a new version changes
  fsdp2 diff my-run --stat                    only the names of the files and the number of lines
  fsdp2 diff my-run --set train.steps=1000    what this setting would change

Edits and changes are relative to the file as fsdp2 wrote it (kept in .fsdp2/base); the header
says which they are. Nothing is written. `fsdp2 update my-run` brings the changes in and keeps
your edits.

exit codes: 0 no difference, 1 differences, 2 bad usage or bad spec
"""


@dataclass(frozen=True)
class Part:
    """The unified diff of two texts of a file, and its number of added and removed lines."""

    added: int
    removed: int
    diff: str


@dataclass(frozen=True)
class Difference:
    """What the user edited in a file, and what the spec or the templates would change."""

    file: File
    edits: Part | None
    changes: Part | None

    @property
    def state(self) -> str:
        if self.edits and self.changes:
            return "both"
        if self.changes:
            return (
                "added"
                if self.file.base is None
                else "removed"
                if self.file.theirs is None
                else "changed"
            )
        return "deleted" if self.file.ours is None and not self.file.obstacle else "edited"

    def to_dict(self) -> dict[str, Any]:
        parts = {
            "edits": self.edits and asdict(self.edits),
            "changes": self.changes and asdict(self.changes),
        }
        return {"path": self.file.path, "state": self.state, **parts, "note": self.file.obstacle}


def add_parser(commands: Any) -> None:
    """Declare the command."""
    description = (
        "Show, file by file, what you edited in a project, and what its spec or the templates would"
        " change."
    )
    summary = "show what differs between a project and what its spec renders to"
    parser = add_command(commands, "diff", run, summary, description, EXAMPLES)
    add_project_arguments(parser)
    parser.add_argument(
        "--stat", action="store_true", help="only the names of the files and the number of lines"
    )


def run(args: argparse.Namespace) -> int:
    """Compare every file and print the differences; 1 if there are any."""
    from ..update import project

    found = project.compare(args.out, args.spec, args.set, args.offline)
    differences = [difference for file in found.files if (difference := compared(file))]
    if args.json:
        files = [difference.to_dict() for difference in differences]
        emit_json({"out": str(args.out), "generator": versions(found), "files": files})
        return FAIL if differences else PASS
    for difference in differences:
        say(_stat(difference) if args.stat else _text(difference))
    log(_summary(args, differences))
    return FAIL if differences else PASS


def compared(file: File) -> Difference | None:
    """How a file differs; None if it does not.

    Changes of spec.yaml are relative to its present text.
    """
    from ..update.project import SPEC

    as_written = "as fsdp2 wrote it"
    edits = changes = None
    if file.path == SPEC:
        edits = _part(file.path, (as_written, file.base), ("as you edited it", file.ours))
        changes = _part(file.path, ("as it is", file.ours), ("as an update writes it", file.theirs))
    elif file.ours != file.theirs or file.obstacle:
        edits = (
            None
            if file.obstacle
            else _part(file.path, (as_written, file.base), ("as you edited it", file.ours))
        )
        changes = _part(
            file.path, (as_written, file.base), ("as its spec renders it now", file.theirs)
        )
    return Difference(file, edits, changes) if edits or changes or file.obstacle else None


def _part(path: str, old: tuple[str, bytes | None], new: tuple[str, bytes | None]) -> Part | None:
    if old[1] == new[1]:
        return None
    before, after = (
        "/dev/null" if text is None else f"{path}\t{label}" for label, text in (old, new)
    )
    lines = list(difflib.unified_diff(_lines(old[1]), _lines(new[1]), before, after))
    marks = [line[0] for line in lines[2:]]
    return Part(marks.count("+"), marks.count("-"), "".join(lines))


def _lines(data: bytes | None) -> list[str]:
    lines = (data or b"").decode("utf-8", "backslashreplace").split("\n")
    unended = [f"{lines[-1]}\n\\ No newline at end of file\n"] if lines[-1] else []
    return [f"{line}\n" for line in lines[:-1]] + unended


def _text(difference: Difference) -> str:
    parts = [part.diff for part in (difference.edits, difference.changes) if part]
    return "".join(
        [f"{difference.file.obstacle}\n" if difference.file.obstacle else "", *parts]
    ).removesuffix("\n")


def _stat(difference: Difference) -> str:
    parts = (("yours", difference.edits), ("the spec's", difference.changes))
    counts = [f"{owner} +{part.added} -{part.removed}" for owner, part in parts if part]
    note = difference.file.obstacle
    return (
        f"{difference.state:<8} {difference.file.path:<22}"
        f" {', '.join([note, *counts] if note else counts)}"
    )


def _summary(args: argparse.Namespace, differences: list[Difference]) -> str:
    if not differences:
        return f"{args.out}: no difference"
    edited = sum(1 for difference in differences if difference.edits or difference.file.obstacle)
    changed = sum(1 for difference in differences if difference.changes)
    words = (
        f"edited by you: {count(edited, 'file')}; changed by the spec or the templates:"
        f" {count(changed, 'file')}"
    )
    if not changed:
        return words
    spec = ["--spec", str(args.spec)] if args.spec else []
    settings = [word for setting in args.set for word in ("--set", setting)]
    return (
        f"{words}; to bring the changes in:"
        f" {shlex.join(['fsdp2', 'update', str(args.out), *spec, *settings])}"
    )
