"""The supervisor of writes: stops one to a path that is not the run's own, before it happens.

`supervised` forks: the child goes on and starts the run, under the filter of `seccomp.py`; the
parent answers its notices until the child ends. The first write that is refused is recorded in the
folder of the run, and ends it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import kernel, mirror, proc, seccomp
from .mounts import is_in
from .world import DENIED, World

_LINKS = 40  # that one path may follow
_INTERFACES = ("/dev", "/proc", "/sys")
_SHARED_MEMORY = "/dev/shm/"
_MAKING = ("mkdir", "mknod", "link", "symlink", "rename")
_LET_SHOW = 0.3  # seconds in which the ranks write where they are
_SKIPPED = "__pycache__"  # Python goes on where it cannot write there


class Paths:
    """Which paths are the run's own.

    `places`: whether what lies below a path has a layer, where there is an overlay.
    """

    def __init__(self, world: World, places: Mapping[str, bool] | None = None) -> None:
        self._world, self._places = world, places or {}
        self.overlaid = bool(self._places)
        self._own = (world.work, *world.allowed, *_INTERFACES)
        self._others = tuple(f"{base}/root" for base in world.bases)

    def own(self, path: str) -> bool:
        """Whether a run may write to a path without links in it."""
        if any(is_in(path, name) for name in self._own) or not path.startswith("/"):
            return True
        return self._places.get(
            max((one for one in self._places if is_in(path, one)), key=len, default=""), False
        )

    def resolved(self, path: str, follow: bool, keeps: bool) -> str:
        """A path without links.

        Links of the mirror on the way are replaced by what they lead to. Raises OSError.
        """
        todo, done, links = path.split("/")[::-1], "", 0
        while todo:
            part = todo.pop()
            if part in ("", "."):
                continue
            if part == "..":
                done = done.rpartition("/")[0]
                continue
            here, last = f"{done}/{part}", not any(todo)
            if (last and not follow) or not os.path.islink(here):
                done = here
                continue
            source = (
                mirror.original(self._world.mirror, here, self._others)
                if self._world.mirror
                else ""
            )
            if source and not any(is_in(source, name) for name in self._world.allowed):
                if not last or os.path.exists(source):
                    mirror.own(here, source, keeps or not last)
                done = here
                continue
            links += 1
            if links > _LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            to = os.readlink(here)
            todo += to.split("/")[::-1]
            done = "" if to.startswith("/") else done
        return done or "/"


def supervised(paths: Paths, folder: str) -> None:
    """Go on in a child whose writes are judged.

    Raises OSError, in the caller alone, where the kernel does not offer that.
    """
    known, program = seccomp.numbers(), seccomp.program()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    child = os.fork()
    if child == 0:
        ours.close()
        try:
            listener = kernel.install_filter(program)
        except OSError as error:
            theirs.send(json.dumps([error.errno, error.strerror]).encode())
            os._exit(1)
        socket.send_fds(theirs, [b"ready"], [listener])
        os.close(listener)
        theirs.close()
        return
    theirs.close()
    answer, descriptors, _, _ = socket.recv_fds(ours, 4096, 1)
    ours.close()
    if not descriptors:
        os.waitpid(child, 0)
        number, words = json.loads(answer)
        raise OSError(number, words, "seccomp")
    try:
        code = _Supervisor(descriptors[0], known, paths, folder, child).serve()
    except BaseException:
        import traceback

        traceback.print_exc()
        os.kill(child, signal.SIGKILL)
        code = 1
    os._exit(code)


class _Supervisor:
    """Answers the notices of one run."""

    def __init__(
        self, listener: int, known: dict[int, seccomp.Call], paths: Paths, folder: str, child: int
    ) -> None:
        self.listener, self.known, self.paths, self.folder, self.child = (
            listener,
            known,
            paths,
            folder,
            child,
        )
        self.made: set[str] = set()  # in shared memory
        self.end_at = float("inf")

    def serve(self) -> int:
        """Until the child has ended: its exit code."""
        poll = select.poll()
        poll.register(self.listener, select.POLLIN)
        ended = os.pidfd_open(self.child)
        poll.register(ended, select.POLLIN)
        while True:
            ready = {number for number, _ in poll.poll(50 if self.end_at < float("inf") else None)}
            if (
                self.listener in ready
                and (notice := seccomp.receive(self.listener, self.known)) is not None
            ):
                self.judge(notice)
            if time.monotonic() > self.end_at:
                self.end_at = float("inf")
                _end_run(self.child)
            if ended in ready:
                break
        for path in self.made:  # what a killed rank left
            with contextlib.suppress(OSError):
                os.unlink(path)
        code = os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])
        if code < 0:
            os.kill(os.getpid(), -code)
        return code

    def judge(self, notice: seccomp.Notice) -> None:
        """Let a call go on, or refuse it."""
        try:
            refused = self._refused(notice)
        except (
            FileNotFoundError,
            NotADirectoryError,
            ProcessLookupError,
        ):  # the kernel says so, too, or nobody waits
            refused = None
        except OSError as error:  # no space for the copy of a file, or a path that cannot be read
            self._record(
                {"path": error.filename or "", "error": error.errno, "call": notice.call.name},
                notice.thread,
            )
            seccomp.refuse(self.listener, notice, error.errno or errno.EIO)
            return
        if refused is None:
            seccomp.let_go_on(self.listener, notice)
            return
        if _SKIPPED not in refused.split("/"):
            self._record({"path": refused, "call": notice.call.name}, notice.thread)
        seccomp.refuse(self.listener, notice, errno.EPERM)

    def _refused(self, notice: seccomp.Notice) -> str | None:
        """The user's path that a call would change; None if it changes none, or the kernel refuses
        it by itself.
        """
        thread, flags = notice.thread, notice.opens_with()
        # the filter cannot see its flags
        if notice.call.name == "openat2" and not flags & seccomp.WRITES:
            return None
        for operand in notice.call.operands:
            if notice.call.descriptor:
                path, follow = _target(thread, notice.arguments[0]), False
            else:
                path = _absolute(thread, notice, operand)
                follow = _follows(notice, operand, flags)
            if not path.startswith("/") or path.endswith(" (deleted)"):
                continue
            exists = os.path.lexists(path)
            path = self.paths.resolved(path, follow, keeps=not flags & os.O_TRUNC)
            if path.startswith(_SHARED_MEMORY) and not self.paths.overlaid:
                own = self._is_made_here(
                    path, bool(flags & os.O_CREAT) or notice.call.name.startswith(_MAKING)
                )
            else:
                own = self.paths.own(path)
            makes = operand is notice.call.operands[-1]
            if not own and _changes(notice.call.name, path, flags, exists, makes):
                return path
        return None

    def _is_made_here(self, path: str, makes: bool) -> bool:
        """Whether this run has made, or makes now, what is at a path of shared memory.

        A folder there is somebody's.
        """
        if makes and not os.path.lexists(path) and os.path.dirname(path) + "/" == _SHARED_MEMORY:
            self.made.add(path)
        return any(is_in(path, one) for one in self.made)

    def _record(self, found: dict[str, Any], thread: int) -> None:
        """Note the first write that was refused, let the rank show its line, and end the run."""
        file = Path(self.folder, DENIED)
        if file.exists():
            return
        with contextlib.suppress(OSError):
            found["size"] = os.lstat(found["path"]).st_size
        above = proc.ancestors(thread)
        ranks = [pid for pid in above if _shows_stacks(pid)][:1]
        found["command"] = (
            proc.command(thread) if ranks != above[:1] else []
        )  # of a process that a rank has started
        file.write_text(json.dumps({**found, "in_rank": bool(ranks)}), encoding="utf-8")
        for pid in ranks:
            with contextlib.suppress(OSError):
                os.kill(pid, kernel.STACKS_SIGNAL)
        self.end_at = time.monotonic() + _LET_SHOW


def _absolute(thread: int, notice: seccomp.Notice, operand: seccomp.Operand) -> str:
    """The path of an operand, as the thread means it; its links are not followed."""
    address = notice.arguments[operand.path]
    start = seccomp.AT_CWD if operand.folder is None else _signed(notice.arguments[operand.folder])
    text = seccomp.text(thread, address) if address else ""
    for name in ("/proc/self", "/proc/thread-self"):
        if is_in(text, name):
            text = f"/proc/{thread}{text[len(name) :]}"
    if text.startswith("/"):
        return text
    base = os.readlink(f"/proc/{thread}/cwd") if start == seccomp.AT_CWD else _target(thread, start)
    return f"{base}/{text}" if text else base


def _target(thread: int, descriptor: int) -> str:
    return os.readlink(f"/proc/{thread}/fd/{_signed(descriptor)}")


def _signed(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def _follows(notice: seccomp.Notice, operand: seccomp.Operand, flags: int) -> bool:
    """Whether a link at the end of the path is followed."""
    if flags:
        exclusive = flags & os.O_CREAT and flags & os.O_EXCL
        return not (flags & os.O_NOFOLLOW or exclusive)
    given = notice.arguments[operand.flags] if operand.flags is not None else 0
    return bool(given & seccomp.FOLLOW) or bool(operand.follow and not given & seccomp.NO_FOLLOW)


_MAKES: dict[str, Callable[[bool], bool]] = {
    **dict.fromkeys(
        ("mkdir", "mkdirat", "symlink", "symlinkat", "mknod", "mknodat"), lambda exists: not exists
    ),
    **dict.fromkeys(("unlink", "unlinkat", "rmdir"), lambda exists: exists),
}


def _changes(call: str, path: str, flags: int, exists: bool, last: bool) -> bool:
    """Whether the kernel would let the call change anything at a path of the user's.

    `last`: it is the last one of the call.
    """
    if call in _MAKES:
        return _MAKES[call](exists) and _writable(os.path.dirname(path))
    if not os.path.lexists(path):
        makes = flags & os.O_CREAT or (last and call.startswith(("rename", "link")))
        return bool(makes) and _writable(os.path.dirname(path))
    # renamed, linked, or changed beside its content: its owner may, or who may write to its folder
    if not flags:
        return (
            _writable(os.path.dirname(path))
            or os.stat(path, follow_symlinks=False).st_uid == os.geteuid()
        )
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        return bool(flags & seccomp.O_TMPFILE) and _writable(path)
    only_made = not flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC)
    return stat.S_ISREG(mode) and not only_made and os.access(path, os.W_OK)


def _writable(folder: str) -> bool:
    return os.access(folder, os.W_OK | os.X_OK)


def _shows_stacks(pid: int) -> bool:
    """Whether a process is a rank, which writes its stacks when it gets the signal."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        return bool(proc.status(pid, "SigCgt", 16) >> (kernel.STACKS_SIGNAL - 1) & 1)
    return False


def _end_run(manager: int) -> None:
    """SIGKILL for all below the manager, which then sees that its ranks have ended."""
    for pid in proc.descendants(manager):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
