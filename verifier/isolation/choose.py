"""Which mechanism this machine has, found by trying, and why not a better one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import MachineRefuses, starving
from . import kernel, overlay, write_supervisor
from .leftovers import remove
from .world import CHECKPOINT, COPY, FILES, GUARD, MECHANISMS, NONE, OVERLAY, World

AUTO = "auto"
_WORKS = "works"  # the answer of the process that holds the namespaces
CHOICES = (AUTO, *MECHANISMS, NONE)


@dataclass(frozen=True)
class Wish:
    """What is asked for.

    `work`: all that the verifier writes; `roots`: the project and the working folder.
    """

    mechanism: str = AUTO
    work: str = ""
    roots: tuple[str, ...] = ()
    caches: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, text: str) -> Wish:
        """The wish from JSON."""
        found = json.loads(text)
        caches = tuple((path, place) for path, place in found["caches"])
        return cls(found["mechanism"], found["work"], tuple(found["roots"]), caches)

    def as_json(self) -> str:
        """The wish as JSON."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Choice:
    """What there is.

    `holder`: the process that holds the namespaces of an overlay, 0 for another mechanism.
    """

    mechanism: str = NONE
    reasons: dict[str, str] = field(default_factory=dict)  # why a better mechanism is not used
    holder: int = 0
    caches: tuple[tuple[str, str], ...] = ()  # as in the wish; all runs of a launcher share them

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Choice:
        """The choice from JSON data."""
        return cls(**{**data, "caches": tuple(map(tuple, data["caches"]))}) if data else cls()


class Trial:
    """Tries the overlay in a process of its own, while this one goes on; `choice` waits for the
    result.
    """

    def __init__(self, wish: Wish) -> None:
        self._wish, self._holder, self._answer = wish, 0, -1
        if wish.mechanism not in (AUTO, OVERLAY):
            return
        self._answer, writer = os.pipe()
        self._holder = os.fork()
        if self._holder == 0:
            os.close(self._answer)
            _in_child(lambda: _hold(wish, writer), writer)
        os.close(writer)

    def choice(self) -> Choice:
        """The mechanism that is used: the one that was asked for, or the best that works; NONE if
        there is none.
        """
        reasons: dict[str, str] = {}
        if self._holder:
            with os.fdopen(self._answer) as stream:
                trouble = stream.read()
            if trouble == _WORKS:
                return Choice(OVERLAY, {}, self._holder, self._wish.caches)
            os.waitpid(self._holder, 0)
            self._holder = 0
            reasons[OVERLAY] = trouble or "the process that tried it was killed"
        wanted = self._wish.mechanism
        if wanted in (OVERLAY, NONE):
            return Choice(NONE, reasons)
        if trouble := _forked(lambda: _try_guard(self._wish)):
            return Choice(NONE, {**reasons, COPY: trouble, GUARD: trouble})
        return Choice(GUARD if wanted == GUARD else COPY, reasons)

    def end(self) -> None:
        """End the process that holds the namespaces."""
        if self._holder:
            os.kill(self._holder, signal.SIGKILL)
            os.waitpid(self._holder, 0)


def _hold(wish: Wish, writer: int) -> str:
    """Try the overlay; if it works, say so to `writer` and hold its namespaces until this process
    is killed. Else why not.
    """
    for number in (int(name) for name in os.listdir("/proc/self/fd")):
        if number not in (
            2,
            writer,
        ):  # the other side sees by the end of a pipe that the launcher is gone
            with contextlib.suppress(OSError):
                os.close(number)
    overlay.begin(wish.caches)
    kernel.die_with_parent()
    file = overlay.unchangeable(wish.roots) if wish.mechanism == AUTO else ""
    if trouble := f"overlayfs cannot change {file} of another owner or group" if file else "":
        return trouble
    if trouble := _forked(lambda: _try_overlay(wish)):
        return trouble
    os.write(writer, _WORKS.encode())
    os.close(writer)
    signal.pause()
    return ""


def _try_overlay(wish: Wish) -> str:
    """What a run does to files, done in a world, to a folder that is not its own: why that does not
    work.
    """
    top = _trial_folder(wish)
    place = top / "place"
    try:
        (place / "folder").mkdir(parents=True)
        for name in ("file", "folder/file"):
            (place / name).write_text("before", encoding="ascii")
        return _forked(lambda: _change(wish, top / "work", place)) or _changed(place)
    finally:
        remove(top)


def _trial_folder(wish: Wish) -> Path:
    """In the folder of the verification, so that it is removed with it where this process is
    killed.
    """
    Path(wish.work).mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="trial-", dir=wish.work))


def _change(wish: Wish, work: Path, place: Path) -> str:
    folder, checkpoint = work / "world", work / FILES / CHECKPOINT
    for path in (folder / FILES / CHECKPOINT, checkpoint):
        path.mkdir(parents=True, exist_ok=True)
    overlay.enter(
        World(
            OVERLAY, str(work), str(folder), str(checkpoint), caches=wish.caches, roots=wish.roots
        )
    )
    (place / "file").write_text("after", encoding="ascii")
    shutil.rmtree(place / "folder")
    (place / "folder").mkdir()
    if list((place / "folder").iterdir()):
        return "overlayfs shows removed files again"
    (place / "new").symlink_to("file")
    return ""


def _changed(place: Path) -> str:
    if (place / "new").exists() or (place / "folder/file").read_text(encoding="ascii") != "before":
        return "a write reached the file below the layer"
    return ""


def _try_guard(wish: Wish) -> str:
    """Why a write cannot be stopped."""
    place = _trial_folder(wish)
    try:
        return _forked(lambda: _be_stopped(place)) or (
            "a write was not stopped" if (place / "file").exists() else ""
        )
    finally:
        remove(place)


def _be_stopped(place: Path) -> str:
    (place / "run").mkdir()
    run = str(place / "run")
    write_supervisor.supervised(write_supervisor.Paths(World(GUARD, run, "", "")), run)
    try:
        (place / "file").write_text("after", encoding="ascii")
    except PermissionError:
        return ""
    return "a write was not stopped"


def _forked(task: Callable[[], str]) -> str:
    """What `task` returns in a process of its own, or the error that it raises; a process of one
    thread, as namespaces need.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _in_child(task, writer)
    os.close(writer)
    with os.fdopen(reader) as stream:
        said = stream.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return said or (f"the trial ended with status {code}" if code else "")


def _in_child(task: Callable[[], str], writer: int = -1) -> None:
    """Run a task to the end of this process."""
    said = ""
    try:
        said = task()
    except OSError as error:
        said = f"{error.strerror} ({error.filename})" if error.filename else str(error)
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    finally:
        if writer >= 0:
            os.write(writer, said.encode())
        os._exit(0)


def must_isolate(choice: Choice, wanted: str) -> None:
    """Raises MachineRefuses where runs cannot be isolated, unless nobody wants that."""
    if choice.mechanism != NONE or wanted == NONE:
        return
    reasons = "; ".join(f"{name}: {why}" for name, why in choice.reasons.items())
    if starved := starving(reasons):
        raise MachineRefuses(starved)
    raise MachineRefuses(
        f"runs cannot be isolated from your files here ({reasons}). In a copy of the project, of"
        f" which you need nothing: --isolation {NONE}"
    )


def in_words(choice: Mapping[str, Any], allowed: Sequence[Path] = ()) -> str:
    """The mechanism as it stands in a report."""
    reasons = "; ".join(f"no {name}: {why}" for name, why in choice.get("reasons", {}).items())
    writes = f"; runs may write to {', '.join(map(str, allowed))}" if allowed else ""
    return f"{choice['mechanism']}{f' ({reasons})' if reasons else ''}{writes}"
