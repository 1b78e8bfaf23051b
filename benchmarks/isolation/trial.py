"""One verification of the script in folders of its own: what was reported, what is left."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import acts_files
import acts_more
import acts_places
from acts import WAYS, Place, populate
from digest import Difference, Entry, differences, tree

HERE = Path(__file__).resolve().parent
SOURCES = [HERE / "trained.py", HERE / "digest.py", *sorted(HERE.glob("acts*.py"))]
REGISTERED = (acts_files, acts_places, acts_more)
SHORT = ("--steps", "2", "--only", "matches-ddp")
MARK = "FSDP2_ISOLATION_TRIAL"
LIMIT = 600.0  # seconds of one verification
PATIENCE = 10.0  # seconds until nothing may live any more
OWN_CACHE = "torchinductor"  # which torch makes in TMPDIR


@dataclass(frozen=True)
class Tool:
    """The fsdp2 that is measured."""

    command: tuple[str, ...]
    isolation: str
    folder: Path
    lock: Path | None

    def verify(self, place: Place, script: list[str], more: tuple[str, ...] = SHORT) -> list[str]:
        """The command line of a verification of the trial's script."""
        isolation = () if self.isolation == "none" else ("--isolation", self.isolation)
        report = f"json={place.reports / uuid.uuid4().hex}.json"
        options = ["verify", "train.py", *more, *isolation, "--report", report]
        return [*self.command, *options, "--", "--base", str(place.base), *script]

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock, so that nothing that takes it, too, runs beside."""
        if self.lock is None:
            yield
            return
        with self.lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that all trials have."""
    whole = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=whole)
    parser.add_argument("--fsdp2", required=True, help='command, such as "python /path/to/skill"')
    parser.add_argument(
        "--isolation",
        default="none",
        choices=["auto", "overlay", "copy", "guard", "none"],
        help="passed on; none: the option is left out",
    )
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("/var/tmp"),
        help="where the folders of the trials are made",
    )
    parser.add_argument("--lock", type=Path, help="hold an flock on this file in each verification")
    return parser


def tool(given: argparse.Namespace) -> Tool:
    """From the options; signals that a shell ignores in the background have effect in children."""
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    return Tool(tuple(shlex.split(given.fsdp2)), given.isolation, given.folder, given.lock)


@contextlib.contextmanager
def folders(tool: Tool, ways: list[str]) -> Iterator[Place]:
    """The folders of one trial, removed at its end."""
    base = Path(tempfile.mkdtemp(prefix="isolation-", dir=tool.folder)).resolve()
    place = Place(base)
    try:
        populate(place, [WAYS[name] for name in ways], SOURCES)
        yield place
    finally:
        for disk in place.project.glob("*/disk"):
            if disk.is_mount():
                subprocess.run(["umount", "--lazy", disk], check=False)
        for folder in (base, place.slash_tmp, place.shm):
            shutil.rmtree(folder, ignore_errors=True)


class Listener:
    """What the ranks say."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.settimeout(0.2)
        self.port = self._socket.getsockname()[1]
        self.received: list[dict[str, Any]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Listener:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        while True:
            try:
                said = json.loads(self._socket.recv(1 << 16))
                self.received.append({**said, "at": time.monotonic()})
            except TimeoutError:
                if self._ended.is_set():
                    return


def environment(place: Place, mark: str) -> dict[str, str]:
    wanted = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH")
    kept = {name: os.environ[name] for name in wanted if name in os.environ}
    own = {
        "HOME": str(place.home),
        "TMPDIR": str(place.tmp),
        MARK: mark,
        "PYTHONWARNINGS": "ignore",
    }
    return {**kept, **own}


def start(command: list[str], place: Place, mark: str) -> subprocess.Popen[bytes]:
    """A command in the project; it prints to a file, so that a process that stays holds no pipe."""
    with (place.reports / f"{mark}.out").open("wb") as out:
        return subprocess.Popen(
            command,
            cwd=place.project,
            env=environment(place, mark),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )


def marked(mark: str, place: Place) -> list[int]:
    """Processes with the mark in their environment, or the trial's folder on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError, IndexError):
            own = f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0")
            own = own or os.fsencode(place.base) in (entry / "cmdline").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if own and state not in "ZX":
                found.append(int(entry.name))
    return found


def survivors(mark: str, place: Place, patience: float = PATIENCE) -> list[str]:
    """The command lines of those that still live after so many seconds; they are ended."""
    until = time.monotonic() + patience
    while (left := marked(mark, place)) and time.monotonic() < until:
        time.sleep(0.05)
    named = []
    for pid in left:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
            named.append(words.decode("utf-8", "replace")[:120])
            os.kill(pid, signal.SIGKILL)
    return named


@dataclass
class Outcome:
    """What one verification came to."""

    code: int | None = None
    seconds: float = 0.0
    report: dict[str, Any] = field(default_factory=dict)
    printed: str = ""
    changes: list[Difference] = field(default_factory=list)
    received: list[dict[str, Any]] = field(default_factory=list)
    before: dict[str, Entry] = field(default_factory=dict)
    survivors: list[str] = field(default_factory=list)
    tmp: list[str] = field(default_factory=list)  # left in TMPDIR
    shm: list[str] = field(default_factory=list)  # left in /dev/shm, beside the trial's own folder

    @property
    def verdict(self) -> str:
        return str(self.report.get("verdict", "no report"))

    @property
    def isolation(self) -> Any:
        return self.report.get("environment", {}).get("isolation")

    def performed(self, way: str) -> int:
        """How many runs did what the way is."""
        return sum(one.get("way") == way and one["event"] == "done" for one in self.received)


def names(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def leftovers(place: Place) -> list[str]:
    return [name for name in names(str(place.tmp)) if not name.startswith(OWN_CACHE)]


def reported(command: list[str]) -> dict[str, Any]:
    """The JSON report of a verification that has ended."""
    path = next(word.removeprefix("json=") for word in command if word.startswith("json="))
    try:
        found: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def verified(
    tool: Tool, place: Place, script: list[str], more: tuple[str, ...] = SHORT, settle: float = 0.0
) -> Outcome:
    """One verification to its end, and what differs `settle` seconds later."""
    outcome, mark = Outcome(), uuid.uuid4().hex
    outcome.before = tree(place.roots())
    shared = set(names("/dev/shm"))
    with Listener() as listener:
        command = tool.verify(place, [*script, "--port", str(listener.port)], more)
        with tool.locked():
            began = time.monotonic()
            process = start(command, place, mark)
            try:
                outcome.code = process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            outcome.seconds = time.monotonic() - began
        outcome.survivors = survivors(mark, place)
        time.sleep(settle)
    outcome.received = listener.received
    outcome.report = reported(command)
    outcome.printed = (place.reports / f"{mark}.out").read_text(encoding="utf-8", errors="replace")
    outcome.changes = differences(outcome.before, tree(place.roots()))
    outcome.tmp = leftovers(place)
    outcome.shm = sorted(set(names("/dev/shm")) - shared)
    return outcome
