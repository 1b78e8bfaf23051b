"""The data files of a spec: which files a pattern means, and whether they can be trained on.

A pattern is a path that exists (a folder means all files below it) or else a glob. URLs are not
looked at: prepare.py opens them.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from .data_content import MAX_READ

STDLIB = "{stdlib}"
MAX_FILES = 10_000
MAX_READ_IN_ALL = 16 << 20


def absolute(pattern: str, base: Path) -> str:
    """The pattern without its dependence on the spec's folder; a `{stdlib}` at the start stays."""
    if pattern.startswith(STDLIB) or is_url(pattern):
        return pattern
    path = Path(pattern).expanduser()
    if path.is_absolute():
        return str(path)
    folder = str(base.absolute())
    return str(Path(glob.escape(folder) if glob.has_magic(pattern) else folder, path))


def is_url(pattern: str) -> bool:
    """Whether fsspec opens it, and no file of this machine is meant."""
    return "://" in pattern


def stdlib() -> str:
    """The standard library folder of the running interpreter."""
    return str(Path(os.__file__).parent)


def matches(pattern: str) -> Iterator[Path]:
    """The files that an absolute pattern means."""
    rest = pattern.removeprefix(STDLIB) if pattern.startswith(STDLIB) else None
    literal = Path(pattern if rest is None else stdlib() + rest)
    if literal.is_dir():
        for folder, subfolders, names in os.walk(literal):
            subfolders.sort()
            yield from filter(Path.is_file, (Path(folder, name) for name in sorted(names)))
    elif literal.exists():
        yield from filter(Path.is_file, [literal])
    else:
        wanted = pattern if rest is None else glob.escape(stdlib()) + rest
        # not Path.glob: the generated data.py uses this one, and they differ on hidden files
        yield from filter(Path.is_file, map(Path, sorted(glob.glob(wanted, recursive=True))))  # noqa: PTH207


def faults(
    patterns: Sequence[str], base: Path, check: Callable[[Path, str], str], cost: int = MAX_READ
) -> Iterator[tuple[int, str]]:
    """Which patterns cannot be trained on, and why: nothing is there, it cannot be read, or the
    check of a file says so.

    `cost` is how many bytes a check reads at most; when MAX_READ_IN_ALL are read, the other files
    are not checked.
    """
    left = MAX_READ_IN_ALL
    for number, pattern in enumerate(patterns):
        if is_url(pattern):
            continue
        files = list(islice(matches(absolute(pattern, base)), MAX_FILES))
        try:
            sizes = [path.stat().st_size for path in files]
            message = _nothing(pattern, base, files, sizes)
            for path, size in zip(files, sizes, strict=True):
                if message or left <= 0:
                    break
                left -= min(size, cost)
                message = check(path, _shown(str(path), base))
        except OSError as error:
            message = f"cannot be read: {error.strerror} ({_shown(str(error.filename), base)})"
        if message:
            yield number, message


def _nothing(pattern: str, base: Path, files: list[Path], sizes: list[int]) -> str:
    if any(sizes):
        return ""
    path = Path(absolute(pattern, base).replace(STDLIB, stdlib(), 1))
    if files:
        return "is an empty file" if files == [path] else f"matches only empty files ({len(files)})"
    where = (
        ""
        if pattern.startswith(STDLIB) or Path(pattern).expanduser().is_absolute()
        else " beside the spec"
    )
    return "is a folder without files" if path.is_dir() else f"matches no file{where}"


def _shown(path: str, base: Path) -> str:
    folder = str(base.absolute()) + os.sep
    return repr(path.removeprefix(folder))
