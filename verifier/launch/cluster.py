"""One run on several machines: a command of the user's starts a worker on each of them (node.py); a
folder that all see carries the rest.

| file in the folder of the run | written by | says | |---|---|---| | request.json | this side |
what to run, on which nodes | | orders | this side | `stacks`, then `end`: what the nodes are to do
with their ranks | | beat, node0.beat, ... | this side, each node | changes every second: a side
that stands still is gone | | node0.json, ... | each node | its ranks, its host, its packages and
its clock | | rendezvous.json | the node of rank 0 | where the ranks meet | | rank0.exit, ... | each
node | how a rank ended |
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

from ..config.launchers import Way, way
from ..isolation import proc
from . import processes
from .capture import Captures

REQUEST, ORDERS, BEAT, RENDEZVOUS = "request.json", "orders", "beat", "rendezvous.json"
EACH = 1.0  # seconds between two beats
LOST = 10.0  # seconds after which a node that does not beat is gone
SKEW = 10.0  # seconds by which a clock may differ
_POLL = 0.1
_START = 300.0  # seconds until every node has begun: a queue may be in between
_END = 8.0


def commands(found: Way, world_size: int, folder: Path) -> list[str]:
    """The command lines of a run."""
    nodes = found.used(world_size)
    worker = [
        sys.executable,
        "-u",
        str(Path(__file__).resolve().parents[1]),
        "node",
        str(folder / REQUEST),
    ]
    known = {"nodes": nodes, "ranks": world_size, "ranks_per_node": world_size // nodes}
    if not found.hosts:
        return [found.command.format(worker=shlex.join(worker), **known)]
    numbered = enumerate(found.hosts[:nodes])
    return [
        found.command.format(worker=shlex.join([*worker, str(k)]), host=host, **known)
        for k, host in numbered
    ]


def run(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request: how each rank ended, or what is wrong with the machines."""
    started = time.monotonic()
    folder, found = Path(request["folder"]), way(request["launcher"], os.environ)
    # Which GPUs its ranks see is a node's own affair.
    about = {
        **request,
        "devices": [],
        "nodes": found.used(request["world_size"]),
        "hosts": found.hosts,
    }
    (folder / REQUEST).write_text(json.dumps(about), encoding="utf-8")
    captures = Captures()
    for number, command in enumerate(commands(found, request["world_size"], folder)):
        if captures.fork(request["folder"], f"launch{number}") == 0:
            processes.die_with_parent()
            os.chdir(request["cwd"])
            os.execvp("sh", ["sh", "-c", command])
    nodes = _Nodes(request, folder, captures, started + request["timeout"])
    try:
        return {**nodes.watch(), "seconds": time.monotonic() - started}
    finally:
        nodes.end()
        processes.end_below(processes.KILL_GRACE, wait=captures.wait)
        captures.close()


class _Nodes:
    """The nodes of one run, as their files report them."""

    def __init__(
        self, request: dict[str, Any], folder: Path, captures: Captures, deadline: float
    ) -> None:
        self.folder, self.captures, self.deadline, self.grace = (
            folder,
            captures,
            deadline,
            request["grace"],
        )
        self.begin_by = time.monotonic() + _START
        self.nodes: dict[str, dict[str, Any]] = {}
        self.seen: dict[str, tuple[str, float]] = {}  # node: its last beat, and when it came
        self.exits: dict[int, dict[str, Any]] = {}
        self.missing = set(range(request["world_size"]))
        self.beats, self.next_beat = 0, 0.0
        self.alone_since = 0.0  # when the last command ended

    def watch(self) -> dict[str, Any]:
        """Wait for every rank.

        After a failure, or the loss of a node, the others get `grace` seconds.
        """
        failed = False
        while self.missing:
            self.beat()
            self.captures.wait(_POLL)
            if fault := self.read():
                return {"fault": "machine", "message": fault}
            bad = any(said["code"] != 0 and not said["killed"] for said in self.exits.values())
            if bad and not failed:
                failed, self.deadline = True, min(self.deadline, time.monotonic() + self.grace)
            if time.monotonic() > self.deadline:
                if waiting := self._waiting():
                    return {"fault": "machine", "message": self._not_begun(waiting)}
                break
        timed_out = bool(self.missing) and not failed
        if self.missing:
            self.order("stacks")
            self.let(1.5)
            self.end()
        killed = {"code": -int(signal.SIGKILL), "at": time.time(), "killed": True}
        ended = [
            self.exits.get(rank, {"rank": rank, **killed}) for rank in {*self.exits, *self.missing}
        ]
        return {"ranks": sorted(ended, key=lambda said: float(said["at"])), "timed_out": timed_out}

    def read(self) -> str:
        """Take what the nodes have written; what is wrong with the machines, "" if nothing is."""
        now = time.monotonic()
        for path in self.folder.glob("node*.json"):
            if path.stem not in self.nodes and (said := _read(path)):
                self.nodes[path.stem] = said
                if fault := self._unlike(said):
                    return fault
        for rank in sorted(self.missing):
            if said := _read(self.folder / f"rank{rank}.exit"):
                self.exits[rank] = said
                self.missing.discard(rank)
        running = any(processes.runs(pid) for pid in proc.children(os.getpid()))
        self.alone_since = 0.0 if running else self.alone_since or now
        over = bool(self.alone_since) and now > self.alone_since + 2.0
        if (over or now > self.begin_by) and (waiting := self._waiting()):
            return self._not_begun(waiting)
        for name, said in self.nodes.items():
            beat = text_of(self.folder / f"{name}.beat")
            if self.seen.get(name, ("", 0.0))[0] != beat or name not in self.seen:
                self.seen[name] = beat, now
            if over or now > self.seen[name][1] + LOST:
                self._lose(said)
        return ""

    def _lose(self, node: dict[str, Any]) -> None:
        """The ranks of a node that stopped answering."""
        for rank in self.missing & set(node["ranks"]):
            gone = {
                "rank": rank,
                "code": -int(signal.SIGKILL),
                "at": 0.0,
                "killed": False,
                "lost": node["host"],
            }
            self.exits[rank] = gone
            self.missing.discard(rank)

    def _unlike(self, said: dict[str, Any]) -> str:
        """How a node differs from this machine's clock, or from the packages of the first node."""
        if abs(ahead := said["time"] - time.time()) > SKEW:
            which = "ahead of" if ahead > 0 else "behind"
            return (
                f"the clock of node {said['host']} is {abs(ahead):.0f} s {which} this machine's:"
                " synchronise them (NTP)"
            )
        first = next(iter(self.nodes.values()))
        for name in ("python", "torch", "fsdp2"):
            if said[name] != first[name]:
                other = f"{name} {said[name]}, node {first['host']} has {first[name]}"
                return f"node {said['host']} has {other}: give all nodes one environment"
        return ""

    def _waiting(self) -> list[int]:
        """The ranks whose node has not begun."""
        return sorted(
            self.missing - {rank for said in self.nodes.values() for rank in said["ranks"]}
        )

    def _not_begun(self, ranks: list[int]) -> str:
        """What the command said that did not start these ranks."""
        errors = [
            line
            for path in sorted(self.folder.glob("launch*.err"))
            for line in text_of(path).splitlines()
        ]
        words = f": {errors[0]}" if errors else " in time (does it wait in a queue?)"
        return f"the launcher's command did not start rank {ranks[0]}{words}"

    def beat(self) -> None:
        """Show the nodes that this side is there."""
        if time.monotonic() >= self.next_beat:
            self.beats, self.next_beat = self.beats + 1, time.monotonic() + EACH
            place(self.folder / BEAT, str(self.beats))

    def order(self, what: str) -> None:
        """Order the nodes to do something with their ranks."""
        place(self.folder / ORDERS, what)

    def let(self, seconds: float) -> None:
        """Wait, and take what the nodes write meanwhile."""
        until = time.monotonic() + seconds
        while self.missing and time.monotonic() < until:
            self.beat()
            self.captures.wait(_POLL)
            self.read()

    def end(self) -> None:
        """Let the nodes end their ranks, and wait for the commands that started them."""
        self.order("end")
        until = time.monotonic() + _END
        while time.monotonic() < until and any(
            processes.runs(pid) for pid in proc.children(os.getpid())
        ):
            self.captures.wait(_POLL)
        if self.missing:
            self.read()


def place(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
    draft.write_text(text, encoding="utf-8")
    draft.rename(path)


def text_of(path: Path) -> str:
    """What a file holds, "" if there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read(path: Path) -> dict[str, Any] | None:
    try:
        said: dict[str, Any] = json.loads(text_of(path))
    except ValueError:
        return None
    return said
