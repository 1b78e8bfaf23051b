"""System calls that Python 3.11 does not offer: namespaces, mounts, capabilities, seccomp.

Linux only.

Each raises OSError with the name of the call as its file name.
"""

from __future__ import annotations

import ctypes
import os
import signal as signals

NEW_NAMESPACE, NEW_USER = 0x00020000, 0x10000000  # CLONE_NEWNS, CLONE_NEWUSER
READ_ONLY, REMOUNT, BIND, RECURSIVE = 0x1, 0x20, 0x1000, 0x4000
NO_SUID, NO_DEVICES, SLAVE = 0x2, 0x4, 1 << 19
_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_CAPABILITY_VERSION = 0x20080522
STACKS_SIGNAL = signals.SIGRTMAX - 1  # a rank that gets it writes where each of its threads is
_PARENT_DEATH_SIGNAL, _NO_NEW_PRIVILEGES = 1, 38
_SET_FILTER, _NEW_LISTENER = 1, 1 << 3

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), call)
    return result


def _syscall(numbers: dict[str, int], call: str, *args: object) -> int:
    number = numbers.get(os.uname().machine)
    if number is None:
        raise OSError(38, f"{call} is not known for {os.uname().machine}", call)
    return _checked(_libc.syscall(number, *args), call)


def unshare(flags: int) -> None:
    """Give this process, which must have one thread, namespaces of its own."""
    _checked(_libc.unshare(flags), "unshare")


def die_with_parent(signal: int = 9) -> None:
    """Let the kernel send this process a signal when its parent ends; 0: no longer.

    A change of rights takes it back.
    """
    _checked(_libc.prctl(_PARENT_DEATH_SIGNAL, signal, 0, 0, 0), "prctl")


def set_namespace(descriptor: int) -> None:
    """Enter the namespace of `/proc/PID/ns/NAME`; for one of users this process must have one
    thread.
    """
    _checked(_libc.setns(descriptor, 0), "setns")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    words = [os.fsencode(word) for word in (source, target, kind)]
    result = _libc.mount(
        words[0], words[1], words[2] or None, ctypes.c_ulong(flags), os.fsencode(data) or None
    )
    _checked(result, f"mount {kind or 'bind'} {target}")


def bind(source: str, target: str, recursive: bool = False) -> None:
    """Show a file or folder at another place, too."""
    mount(source, target, flags=BIND | (RECURSIVE if recursive else 0))


def become_root_folder(folder: str) -> None:
    """Make a mount point the root of this mount namespace, and let go of the old one."""
    os.chdir(folder)
    _syscall(_PIVOT_ROOT, "pivot_root", b".", b".")
    _checked(_libc.umount2(b".", _DETACH), "umount2")
    os.chdir("/")


def drop_capabilities() -> None:
    """Give up what a new user namespace grants: the script runs with the rights that the user
    has.
    """
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    data = (ctypes.c_uint32 * 6)()
    _syscall(_CAPSET, "capset", header, data)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def install_filter(instructions: bytes) -> int:
    """Filter the system calls of this process and of all that it starts; the descriptor that
    receives its notices.
    """
    _checked(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")
    program = _Program(len(instructions) // 8, instructions)
    return _syscall(_SECCOMP, "seccomp", _SET_FILTER, _NEW_LISTENER, ctypes.byref(program))
