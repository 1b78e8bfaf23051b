"""Three states of a project: as it was written, as it is, and as its spec renders it with the
present templates.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ... import __version__
from ...verifier.config.reading import inputs
from ...verifier.errors import UserError
from .. import atomic_write, scaffold
from ..output import log
from ..scaffold import manifest
from ..spec import Spec, SpecError, load, parse
from ..spec.dump import to_yaml
from ..spec.rewrite import rewritten, with_new_names
from . import merge

SPEC = "spec.yaml"


@dataclass(frozen=True)
class File:
    """One file as it was written (`base`), as it is (`ours`), as it would be written now
    (`theirs`). None: there is none.

    All three have the line ends of Unix; `crlf`: the file itself has those of Windows. `obstacle`:
    why it is left alone.
    """

    path: str
    ours: bytes | None = None
    base: bytes | None = None
    theirs: bytes | None = None
    crlf: bool = False
    obstacle: str = ""

    @property
    def labels(self) -> tuple[str, str]:
        return f"{self.path}, yours", f"{self.path}, from its spec by fsdp2 {__version__}"


@dataclass(frozen=True)
class Project:
    """The files of a project; `rendered` are those of its spec, and `made` says how it was
    written.
    """

    out: Path
    made: manifest.Manifest
    rendered: dict[str, bytes]
    files: tuple[File, ...]


def compare(
    out: Path, spec_path: Path | None = None, settings: Sequence[str] = (), offline: bool = False
) -> Project:
    """Compare the project with its own spec.yaml, or the spec at `spec_path`, with these settings.

    `offline`: the data of the new spec need not be here.
    """
    made = manifest.read(out)
    files = _with_bases(out, made, {path: _file(out, path) for path in (*made.files, SPEC)})
    own = files[SPEC]
    if own.obstacle:
        raise UserError(own.obstacle)
    if spec_path is None and own.ours is not None and merge.conflict_lines(own.ours):
        refuse_conflicts(out, files.values())
    before, spec = _specs(out, own.ours, spec_path, settings, offline)
    rendered = {path: text.encode() for path, text in scaffold.render(spec, out).items()}
    for path, text in rendered.items():
        files[path] = replace(files.get(path) or _file(out, path), theirs=text)
    files[SPEC] = replace(own, theirs=_new_spec_text(out, files[SPEC], before, spec))
    return Project(
        out, made, rendered, tuple(files[path] for path in dict.fromkeys([*rendered, *files]))
    )


def refuse_conflicts(out: Path, files: Iterable[File]) -> None:
    """Raises UserError for a file with conflict markers: another merge would hide them."""
    places = [
        f"{out / file.path}:{line}"
        for file in files
        for line in merge.conflict_lines(file.ours or b"")
    ]
    if places:
        lines = [f"{place}: a conflict is marked here and not resolved" for place in places]
        raise UserError(
            "\n".join(
                [*lines, "choose one side of each, and delete the lines <<<<<<<, =======, >>>>>>>"]
            )
        )


def _file(out: Path, path: str) -> File:
    """The file as it is.

    A spec.yaml that is a link is read; everything else only if it is a file in the project.
    """
    obstacle = atomic_write.obstacle(out, path, replace_link=path == SPEC)
    if obstacle or not os.path.lexists(out / path):
        return File(path, obstacle=obstacle)
    try:
        data = inputs.whole(out / path, inputs.WHOLE)
    except OSError as error:
        raise UserError(f"{out / path} cannot be read: {error.strerror}") from None
    crlf = 0 < data.count(b"\n") == data.count(b"\r\n")
    return File(path, data.replace(b"\r\n", b"\n") if crlf else data, crlf=crlf)


def _with_bases(out: Path, made: manifest.Manifest, files: dict[str, File]) -> dict[str, File]:
    """The files with the text that each was written with; a file that nobody edited is its own
    base.
    """
    found, problems = dict(files), []
    for path, digest in made.files.items():
        stored = _file(out, manifest.base_path(path)).ours
        known = [
            text
            for text in (stored, files[path].ours)
            if text is not None and manifest.sha256(text) == digest
        ]
        if known:
            found[path] = replace(files[path], base=known[0])
        else:
            why = "is missing" if stored is None else "is not what the manifest says: it was edited"
            problems.append(f"{out / manifest.base_path(path)} {why}")
    if problems:
        hint = (
            "without it fsdp2 cannot distinguish your edits of the file from its own text; restore"
            f" {manifest.FOLDER} from version control"
        )
        raise UserError("\n".join(f"{problem}; {hint}" for problem in problems))
    return found


def _specs(
    out: Path, own: bytes | None, spec_path: Path | None, settings: Sequence[str], offline: bool
) -> tuple[Spec | None, Spec]:
    """The spec in spec.yaml (None if it is not valid), and the spec to render."""
    path = out / SPEC
    if own is None and spec_path is None:
        raise UserError(
            f"{path} is missing; copy {out / manifest.base_path(SPEC)} there, or give another:"
            " --spec FILE"
        )
    try:
        before = parse(own, path, offline=True) if own is not None else None
    except SpecError:
        before = None
    if own is None or spec_path is not None:
        return before, load(spec_path or path, settings, offline)
    try:
        return before, parse(own, path, settings, log, offline)
    except SpecError as error:
        if before is not None:
            raise
        raise UserError(f"{error}\nfix it there, or give another spec: --spec FILE") from error


def _new_spec_text(out: Path, file: File, before: Spec | None, spec: Spec) -> bytes:
    """The text of spec.yaml: the user's text stays as far as it still describes this spec."""
    path, own, theirs = out / file.path, file.ours, file.theirs or b""
    if own is not None and path.is_symlink() and _parses_to(own, path, spec):
        return own
    text = (
        theirs if own is None or own == file.base else _merged_spec_text(path, file, before, spec)
    )
    if path.is_symlink() and text != own:
        raise UserError(
            f"{path} is a symbolic link, and nothing is written through one; edit {path.resolve()}"
            " yourself"
        )
    return text


def _merged_spec_text(path: Path, file: File, before: Spec | None, spec: Spec) -> bytes:
    """The user's text with the new values in it; what values alone do not determine is merged."""
    edited, theirs = _with_new_names(file.ours or b""), file.theirs or b""
    bases = [theirs if file.base is None else _with_new_names(file.base)]
    if before is not None:
        old, new = before.as_written(), spec.as_written()
        edited = rewritten(edited.decode(), old, new).encode()
        bases.append(rewritten(to_yaml(old), old, new).encode())
    enough = _parses_to(edited, path, spec)
    try:
        for base in bases:
            # keys come and go; where both sides wrote a line, the user's stays
            merged = merge.merge(base, edited, theirs, file.labels, favour_ours=True)
            if _parses_to(merged, path, spec):
                return merged
        if enough:
            return edited
        marked = merge.merge(bases[-1], edited, theirs, file.labels)
        # an edit that contradicts the spec does not win by being the only one: without a base, it
        # is marked
        return (
            marked
            if merge.conflict_lines(marked)
            else merge.merge(b"", edited, theirs, file.labels)
        )
    except merge.NotMerged as error:
        if enough:
            return edited
        hint = f"put the new values into it yourself, then: fsdp2 update {path.parent}"
        raise UserError(f"{path} cannot be merged: {error}; {hint}") from None


def _with_new_names(text: bytes) -> bytes:
    try:
        return with_new_names(text.decode()).encode()
    except UnicodeDecodeError:
        return text


def _parses_to(text: bytes, path: Path, spec: Spec) -> bool:
    try:
        return parse(text, path, offline=True) == spec
    except SpecError:
        return False
