"""Writes files into a folder: all of them or none, never through a link, and no existing file is
lost.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from ..verifier.errors import UserError

Contents = Mapping[str, bytes | None]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _RollbackFailed(Exception):
    """A file could neither be replaced nor restored; the old files are still in the staging
    folder.
    """


def write_files(contents: Contents, out: Path) -> None:
    """Write these files below `out` and remove those that are None: all of it, or nothing."""
    target = Path(os.path.realpath(out))
    try:
        with defer_signals():
            target.parent.mkdir(parents=True, exist_ok=True)
            # inside an existing folder, which may be a mount point: files cannot be renamed across
            # file systems
            folder = target if target.exists() else target.parent
            staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=folder))
            try:
                _stage(contents, staging / "new", target)
                if target.exists():
                    _replace_each(contents, staging / "new", target, staging / "old")
                else:
                    (staging / "new").rename(target)
            except _RollbackFailed as error:
                raise UserError(
                    f"cannot write {out}, and {error}: the previous files are in {staging}/old"
                ) from error
            except BaseException:
                shutil.rmtree(staging, ignore_errors=True)
                raise
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise UserError(f"cannot write {out}: {error.strerror}{where}") from error


def obstacle(out: Path, path: str, replace_link: bool = False) -> str:
    """Why nothing may be written to `out/path`; empty if it may.

    A link is never written through.
    """
    for parent in reversed(Path(path).parents[:-1]):
        if os.path.lexists(out / parent) and (
            (out / parent).is_symlink() or not (out / parent).is_dir()
        ):
            return f"{out / parent} is in the way: it must be a folder"
    if (out / path).is_symlink() and not replace_link:
        return f"{out / path} is a symbolic link"
    if (out / path).exists() and not (out / path).is_file():
        return f"{out / path} is in the way: it must be a file"
    return ""


def is_inside(path: str) -> bool:
    """Whether this is a path of a file below a folder: relative, normalised, without `..`."""
    pure = PurePosixPath(path)
    return (
        path.isprintable()
        and str(pure) == path != "."
        and not pure.is_absolute()
        and ".." not in pure.parts
    )


@contextmanager
def defer_signals() -> Iterator[None]:
    """Signals are delivered after the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stage(contents: Contents, new: Path, target: Path) -> None:
    new.mkdir()
    for path, data in contents.items():
        if data is not None:
            (new / path).parent.mkdir(parents=True, exist_ok=True)
            (new / path).write_bytes(data)
            if (target / path).is_file():
                shutil.copymode(target / path, new / path)


def _replace_each(contents: Contents, new: Path, target: Path, old: Path) -> None:
    """Move the new files in; if one cannot be moved, restore everything."""
    folders = {parent for path in contents for parent in Path(path).parents[:-1]}
    fresh = [folder for folder in folders if not (target / folder).exists()]
    try:
        for path, data in contents.items():
            (old / path).parent.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(target / path):
                (target / path).rename(old / path)
            if data is not None:
                (target / path).parent.mkdir(parents=True, exist_ok=True)
                (new / path).rename(target / path)
    except BaseException:
        _roll_back(contents, new, target, old)
        _remove_empty(target, fresh)
        raise
    _remove_empty(target, folders)


def _roll_back(contents: Contents, new: Path, target: Path, old: Path) -> None:
    stuck = []
    for path, data in contents.items():
        try:
            if os.path.lexists(old / path):
                (old / path).rename(target / path)
            elif data is not None and not (new / path).exists():
                (target / path).unlink()
        except OSError:
            stuck.append(path)
    if stuck:
        raise _RollbackFailed(f"{', '.join(stuck)} could not be restored")


def _remove_empty(target: Path, folders: Iterable[Path]) -> None:
    for folder in sorted(folders, key=lambda folder: len(folder.parts), reverse=True):
        with suppress(OSError):
            (target / folder).rmdir()
