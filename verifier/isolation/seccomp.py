"""Notices of system calls that change files: which calls, and the filter that sends them (seccomp
user notification).

The kernel stops a thread at such a call until the supervisor answers, whatever language made the
call. A file that is opened for reading alone sends no notice. Descriptors that are open already are
not watched: they were judged when they were opened.
"""

from __future__ import annotations

import fcntl
import os
import struct
from dataclasses import dataclass
from pathlib import Path

AT_CWD, PATH_MAX = -100, 4096
NO_FOLLOW, FOLLOW = 0x100, 0x400  # AT_SYMLINK_NOFOLLOW, AT_SYMLINK_FOLLOW
O_TMPFILE = 0o20000000
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | O_TMPFILE
_NOTIFY, _ALLOW, _UNKNOWN = 0x7FC00000, 0x7FFF0000, 0x00050000 | 38  # the last one is ENOSYS
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1


@dataclass(frozen=True)
class Operand:
    """A path of a call: the numbers of its arguments.

    `follow`: what a link at its end means: 1 followed, 0 not; else flags.
    """

    path: int
    folder: int | None = None  # the descriptor that a relative path starts from
    follow: int = 0
    flags: int | None = None  # the argument with AT_SYMLINK_NOFOLLOW or AT_SYMLINK_FOLLOW


@dataclass(frozen=True)
class Call:
    """A system call, by its numbers on x86_64 and aarch64 (0: not there)."""

    name: str
    x86_64: int
    aarch64: int
    operands: tuple[Operand, ...] = ()
    descriptor: bool = False  # the first argument is the file
    opens: int | None = None  # the argument with the flags of open(2)


_FD = Operand(0)
CALLS = (
    Call("open", 2, 0, (Operand(0, None, 1),), opens=1),
    Call("creat", 85, 0, (Operand(0, None, 1),)),
    Call("openat", 257, 56, (Operand(1, 0, 1),), opens=2),
    Call("openat2", 437, 437, (Operand(1, 0, 1),)),
    Call("truncate", 76, 45, (Operand(0, None, 1),)),
    Call("rename", 82, 0, (Operand(0), Operand(1))),
    Call("renameat", 264, 38, (Operand(1, 0), Operand(3, 2))),
    Call("renameat2", 316, 276, (Operand(1, 0), Operand(3, 2))),
    Call("mkdir", 83, 0, (Operand(0),)),
    Call("mkdirat", 258, 34, (Operand(1, 0),)),
    Call("rmdir", 84, 0, (Operand(0),)),
    Call("unlink", 87, 0, (Operand(0),)),
    Call("unlinkat", 263, 35, (Operand(1, 0),)),
    Call("link", 86, 0, (Operand(0), Operand(1))),
    Call("linkat", 265, 37, (Operand(1, 0, 0, 4), Operand(3, 2))),
    Call("symlink", 88, 0, (Operand(1),)),
    Call("symlinkat", 266, 36, (Operand(2, 1),)),
    Call("mknod", 133, 0, (Operand(0),)),
    Call("mknodat", 259, 33, (Operand(1, 0),)),
    Call("chmod", 90, 0, (Operand(0, None, 1),)),
    Call("fchmod", 91, 52, (_FD,), descriptor=True),
    Call("fchmodat", 268, 53, (Operand(1, 0, 1),)),
    Call("fchmodat2", 452, 452, (Operand(1, 0, 1, 3),)),
    Call("chown", 92, 0, (Operand(0, None, 1),)),
    Call("fchown", 93, 55, (_FD,), descriptor=True),
    Call("lchown", 94, 0, (Operand(0),)),
    Call("fchownat", 260, 54, (Operand(1, 0, 1, 4),)),
    Call("utime", 132, 0, (Operand(0, None, 1),)),
    Call("utimes", 235, 0, (Operand(0, None, 1),)),
    Call("futimesat", 261, 0, (Operand(1, 0, 1),)),
    Call("utimensat", 280, 88, (Operand(1, 0, 1, 3),)),
    Call("setxattr", 188, 5, (Operand(0, None, 1),)),
    Call("lsetxattr", 189, 6, (Operand(0),)),
    Call("fsetxattr", 190, 7, (_FD,), descriptor=True),
    Call("removexattr", 197, 14, (Operand(0, None, 1),)),
    Call("lremovexattr", 198, 15, (Operand(0),)),
    Call("fremovexattr", 199, 16, (_FD,), descriptor=True),
)
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


@dataclass(frozen=True)
class Notice:
    """A thread waits at a call."""

    id: int
    thread: int
    call: Call
    arguments: tuple[int, ...]

    def opens_with(self) -> int:
        """The flags of open(2); 0 if the call opens nothing."""
        if self.call.name == "creat":
            return os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        if self.call.name == "openat2":
            return int.from_bytes(memory(self.thread, self.arguments[2], 8), "little")
        return self.arguments[self.call.opens] & 0xFFFFFFFF if self.call.opens is not None else 0


def numbers() -> dict[int, Call]:
    """The calls by their number on this machine.

    Raises OSError for a machine whose numbers are not known.
    """
    machine = os.uname().machine
    if machine not in _MACHINES:
        raise OSError(38, f"the calls of {machine} are not known", "seccomp")
    return {number: call for call in CALLS if (number := getattr(call, machine))}


def program() -> bytes:
    """The filter, as instructions of the kernel's packet filter."""
    found = [
        _do(0x20, 4),
        _do(0x15, _MACHINES[os.uname().machine], 1, 0),
        _do(0x06, _UNKNOWN),
        _do(0x20, 0),
    ]
    for number, call in numbers().items():
        if call.opens is None:
            found += [_do(0x15, number, 0, 1), _do(0x06, _NOTIFY)]
        else:
            flags = 16 + 8 * call.opens  # the lower half of the argument in struct seccomp_data
            found += [_do(0x15, number, 0, 4), _do(0x20, flags), _do(0x45, WRITES, 0, 1)]
            found += [_do(0x06, _NOTIFY), _do(0x06, _ALLOW)]
    return b"".join([*found, _do(0x06, _ALLOW)])


def _do(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def receive(listener: int, known: dict[int, Call]) -> Notice | None:
    """The next notice; None if the thread has gone."""
    data = bytearray(80)
    try:
        fcntl.ioctl(listener, _RECEIVE, data, True)
    except OSError:
        return None
    number, thread, _, call, _, _, *arguments = struct.unpack("=QIIiIQ6Q", data)
    return Notice(number, thread, known[call], tuple(arguments))


def let_go_on(listener: int, notice: Notice) -> None:
    """Let the kernel make the call."""
    _answer(listener, struct.pack("=QqiI", notice.id, 0, 0, _CONTINUE))


def refuse(listener: int, notice: Notice, error: int) -> None:
    """Let the call fail with an errno."""
    _answer(listener, struct.pack("=QqiI", notice.id, 0, -error, 0))


def _answer(listener: int, data: bytes) -> None:
    try:
        fcntl.ioctl(listener, _SEND, bytearray(data), True)
    except OSError:  # the thread was interrupted, or is gone
        return


def memory(thread: int, address: int, size: int) -> bytes:
    """What a thread has at an address. Raises OSError if that cannot be read."""
    with Path(f"/proc/{thread}/mem").open("rb", buffering=0) as file:
        file.seek(address)
        return file.read(size)


def text(thread: int, address: int) -> str:
    """The path at an address.

    A read ends at the end of a page, since what lies behind it may not be there.
    """
    found = b""
    while b"\0" not in found and len(found) < PATH_MAX:
        found += memory(thread, address + len(found), 4096 - (address + len(found)) % 4096)
    return os.fsdecode(found.partition(b"\0")[0])
