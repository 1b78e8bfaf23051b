"""Opens every file that a command reads: regular files, of a bounded size, and without waiting.

A FIFO, a socket or a device is refused before it is opened: opening it may wait for ever, or do
something. Two exceptions: what the caller has connected to one of our own descriptors
(`/dev/stdin`, `<(command)` of a shell), which is read for at most a minute, and `/dev/null`.
"""

from __future__ import annotations

import errno
import os
import re
import select
import stat
import time
from collections.abc import Callable
from pathlib import Path

KIB, MIB = 1 << 10, 1 << 20
SCRIPT = 4 * MIB  # a Python file
RECORD = 4 * MIB  # a manifest, or another JSON file of a known form
REPORT = 16 * MIB  # a JSON report: those of real verifications have less than 1 MiB
WHOLE = 64 * MIB  # any file of a project, or of an installed copy
PATIENCE = 60.0  # seconds until the end of what one of our own descriptors sends

_OWN = re.compile(r"/dev/(stdin|stdout|stderr)|/(?:dev|proc/self)/fd/(\d{1,7})")
_STREAMS = ("stdin", "stdout", "stderr")
_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)
# A pipe can be read once, and some commands read a spec again to plan it.
_received: dict[tuple[int, int], bytes] = {}


class Refused(OSError):
    """It is no regular file, or too large, or sends nothing; `strerror` says which."""


def whole(path: Path, limit: int) -> bytes:
    """All that is in the file. Raises OSError as `open` does, and Refused."""
    data = head(path, limit + 1)
    if len(data) > limit:
        size = f"{limit // MIB} MiB" if limit >= MIB else f"{limit // KIB} KiB"
        raise Refused(errno.EFBIG, f"larger than {size}", str(path))
    return data


def text(path: Path, limit: int) -> str:
    """`whole` as UTF-8 text. Raises UnicodeDecodeError, too."""
    return normalised(whole(path, limit).decode("utf-8"))


def normalised(text: str) -> str:
    """The text with every end of a line as `\\n`."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def head(path: Path, most: int) -> bytes:
    """The first `most` bytes of the file, or all. Raises OSError as `open` does, and Refused."""
    number = own_descriptor(path)
    if number is not None:
        return _from_descriptor(number, path, most)
    _must_be_a_file(path, path.stat())
    # it may have become another kind since: no waiting, and no terminal that takes us over
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _must_be_a_file(path, os.fstat(descriptor))
        return _read(descriptor, most)
    finally:
        os.close(descriptor)


def own_descriptor(path: Path) -> int | None:
    """The number of our own descriptor that a path such as `/dev/stdin` or `/dev/fd/63` names."""
    match = _OWN.fullmatch(os.path.abspath(path))  # noqa: PTH100 - a link must not be followed
    if match is None:
        return None
    return int(match[2]) if match[2] else _STREAMS.index(match[1])


def kind_of(status: os.stat_result) -> str:
    """`a FIFO`, `a socket` or a device, which no command opens by its path; "" for all else."""
    if stat.S_ISCHR(status.st_mode) and status.st_rdev == Path(os.devnull).stat().st_rdev:
        return ""
    return next((name for is_kind, name in _KINDS if is_kind(status.st_mode)), "")


def _must_be_a_file(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind := kind_of(status):
        raise Refused(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def _from_descriptor(number: int, path: Path, most: int) -> bytes:
    """What one of our own descriptors gives until its end; a file is read from its start."""
    status = os.fstat(number)
    if stat.S_ISREG(status.st_mode):
        return os.pread(number, most, 0)
    key = (status.st_dev, status.st_ino)
    if key not in _received:
        _received[key] = _read(number, most, _Patience(number, path))
    return _received[key][:most]


class _Patience:
    """Waits for the next bytes of a descriptor, until the time of all of them is over."""

    def __init__(self, number: int, path: Path) -> None:
        self._path, self._until = path, time.monotonic() + PATIENCE
        self._poll = select.poll()
        self._poll.register(number, select.POLLIN)

    def __call__(self) -> None:
        if not self._poll.poll(max(self._until - time.monotonic(), 0.0) * 1000):
            reason = f"it has not ended within {PATIENCE:.0f} s"
            raise Refused(errno.ETIMEDOUT, reason, str(self._path))


def _read(descriptor: int, most: int, wait: Callable[[], None] = lambda: None) -> bytes:
    parts: list[bytes] = []
    left = most
    while left:
        wait()
        part = os.read(descriptor, min(left, MIB))
        if not part:
            break
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
