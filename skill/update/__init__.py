"""Updates each file of a project when its spec or the templates change: a three-way merge, and no
edit is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...verifier.errors import UserError
from .. import atomic_write
from ..scaffold import manifest
from . import merge
from .project import SPEC, File, Project, refuse_conflicts

UNRESOLVED = ("conflict", "in the way", "not merged")


@dataclass(frozen=True)
class Outcome:
    """The update of one file: its content afterwards, and the lines on which conflicts are
    marked.
    """

    file: File
    action: str
    content: bytes | None
    note: str = ""
    lines: tuple[int, ...] = ()

    @property
    def unresolved(self) -> bool:
        """Whether something is left for the user to do."""
        return self.action in UNRESOLVED

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": self.file.path,
            "action": self.action,
            "note": self.note,
            "lines": list(self.lines),
        }


def plan(project: Project) -> list[Outcome]:
    """What an update does, file by file. Writes nothing."""
    refuse_conflicts(project.out, project.files)
    return [_spec_outcome(file) if file.path == SPEC else _outcome(file) for file in project.files]


def apply(project: Project, outcomes: Sequence[Outcome]) -> None:
    """Write what was planned, and the manifest: all of it or nothing."""
    out, contents = project.out, _contents(project, outcomes)
    for path in contents:
        if why := atomic_write.obstacle(out, path):
            raise UserError(why)
    if contents:
        atomic_write.write_files(contents, out)


def _contents(project: Project, outcomes: Sequence[Outcome]) -> dict[str, bytes | None]:
    contents: dict[str, bytes | None] = {}
    bases = dict(project.rendered)
    for outcome in outcomes:
        file, data = outcome.file, outcome.content
        if data != file.ours:
            contents[file.path] = (
                data.replace(b"\n", b"\r\n") if file.crlf and data is not None else data
            )
        if outcome.action == "not merged" and file.base is not None:
            bases[file.path] = file.base
    record = manifest.record(bases, project.made.others)
    stale = [manifest.base_path(path) for path in project.made.files if path not in bases]
    contents |= {path: None for path in stale if (project.out / path).exists()}
    for path, text in record.items():
        place = project.out / path
        if not place.is_file() or place.read_bytes() != text:
            contents[path] = text
    return contents


def _outcome(file: File) -> Outcome:
    ours, base, theirs = file.ours, file.base, file.theirs
    elsewhere = f"the new text is in {manifest.base_path(file.path)}"
    if theirs is None:
        if file.obstacle or ours not in (base, None):
            return Outcome(
                file,
                "kept",
                ours,
                "no longer part of the project, but you edited it: it is your own file now",
            )
        return Outcome(file, "unchanged" if ours is None else "removed", None)
    if file.obstacle:
        if theirs == base:
            return Outcome(file, "kept", ours, file.obstacle)
        return Outcome(file, "in the way", ours, f"{file.obstacle}; {elsewhere}")
    if ours == theirs:
        return Outcome(file, "unchanged", ours)
    if ours == base:
        return Outcome(file, "added" if base is None else "updated", theirs)
    if ours is None:
        changed = "" if theirs == base else f" (its new text is in {manifest.base_path(file.path)})"
        return Outcome(file, "deleted", ours, f"you deleted it; it stays deleted{changed}")
    if theirs == base:
        return Outcome(file, "kept", ours, "only you changed it")
    if base is None:
        return Outcome(file, "in the way", ours, f"you have a file of this name; {elsewhere}")
    try:
        text = merge.merge(base, ours, theirs, file.labels)
    except merge.NoGit as error:
        note = f"both you and the spec changed it, and {error}: install git, then update again"
        return Outcome(file, "not merged", ours, note)
    except merge.NotMerged as error:
        return Outcome(file, "in the way", ours, f"{error}, so it is left as it is; {elsewhere}")
    return _merged(file, text)


def _merged(file: File, text: bytes) -> Outcome:
    if lines := merge.conflict_lines(text, b"<"):
        return Outcome(
            file, "conflict", text, "both you and the spec changed these lines", tuple(lines)
        )
    return Outcome(file, "merged", text, "your edits are in it")


def _spec_outcome(file: File) -> Outcome:
    """spec.yaml: its new text was worked out by `project.compare`."""
    text = file.theirs or b""
    if text == file.ours:
        return Outcome(
            file,
            *(("unchanged", text) if text == file.base else ("kept", text, "as you edited it")),
        )
    return Outcome(file, "updated", text) if file.ours in (file.base, None) else _merged(file, text)
