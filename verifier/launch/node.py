"""One node of a run on several machines (cluster.py): starts its ranks, notes how each ended, and
ends them when it is asked to.

It imports no torch: in a rank the script is the first to do so. Which ranks are its own: those of
its number (given, for a command with `{host}`) or of its task, as Slurm, Open MPI or PMI count
tasks; with a task for each rank it is one of them.
"""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ..errors import PROBE_FAILED
from ..isolation.enter import enter
from ..isolation.world import World
from . import processes
from .capture import Captures
from .cluster import BEAT, EACH, ORDERS, RENDEZVOUS, place, text_of
from .manager import environment
from .request import Live

TASKS = (  # number of tasks, number of this one, and its number on its machine
    ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
)
NOT_SHARED = 96  # exit status of a node that does not see the folder of the run
ABANDONED = 30.0  # seconds after which the other side is gone
_POLL = 0.2


def serve(path: str, given: str, live: Live) -> NoReturn:
    """Run the ranks of this node to their end."""
    try:
        request = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError:
        print(
            f"{socket.gethostname()} does not see {path}: set TMPDIR to a folder that all nodes"
            " share",
            file=sys.stderr,
        )
        processes.leave(NOT_SHARED)
    try:
        if request["world"]:
            enter(World.of(request["world"]), request["folder"])
    except OSError as error:
        # the guard of the machine that has started this node, if that is this one
        if error.errno != errno.EBUSY:
            print(f"{socket.gethostname()} cannot isolate a run: {error}", file=sys.stderr)
            processes.leave(1)
    processes.adopt_orphans()
    processes.become(partial(_serve, request, given, live), 1)


def mine(
    request: dict[str, Any], given: str, environ: Mapping[str, str]
) -> tuple[int, list[int], dict[str, str]]:
    """(number of this task, its ranks, LOCAL_RANK and its like for the first of them).

    Raises ValueError if tasks do not fit.
    """
    world, nodes = request["world_size"], request["nodes"]
    counted = next((names for names in TASKS if names[0] in environ and names[1] in environ), None)
    if given or counted is None:
        tasks, number, local = nodes, int(given or 0), 0
    else:
        tasks, number, local = (int(environ.get(name, "0")) for name in counted)
    if tasks not in (nodes, world):
        raise ValueError(
            f"the launcher's command starts {tasks} tasks; {nodes} (one a node) or {world} (one a"
            " rank) are needed"
        )
    each = world // tasks
    node = number if tasks == nodes else number // (world // nodes)
    names = {
        "LOCAL_RANK": str(0 if tasks == nodes else local),
        "LOCAL_WORLD_SIZE": str(world // nodes),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(nodes),
    }
    return number, list(range(number * each, (number + 1) * each)), names


def _serve(request: dict[str, Any], given: str, live: Live) -> int:
    folder = Path(request["folder"])
    try:
        number, ranks, names = mine(request, given, os.environ)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    _announce(request, number, ranks)
    if (rendezvous := _rendezvous(folder)) is None:
        return 1
    captures = Captures()
    pids: dict[int, int] = {}
    for local, rank in enumerate(ranks, int(names["LOCAL_RANK"])):
        pid = captures.fork(request["folder"], f"rank{rank}")
        if pid == 0:
            own = {**names, "LOCAL_RANK": str(local), "MASTER_ADDR": rendezvous["host"]}
            _be_rank(request, rank, rendezvous["port"], own, live)
        pids[pid] = rank
    try:
        _watch(folder, number, pids, captures)
    finally:
        processes.end_below(wait=captures.wait)
        captures.close()
    return 0


def _announce(request: dict[str, Any], number: int, ranks: list[int]) -> None:
    """Write what this node is; that of rank 0 says where all ranks meet."""
    folder = Path(request["folder"])
    if request["hosts"]:
        host = request["hosts"][number]
    else:
        host = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    about = {
        "ranks": ranks,
        "host": host,
        "time": time.time(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "fsdp2": _version("verified-fsdp2"),
    }
    place(folder / f"node{number}.json", json.dumps(about))
    if 0 in ranks:
        meeting = {"host": _address(host, request["nodes"]), "port": _free_port()}
        place(folder / RENDEZVOUS, json.dumps(meeting))


def _be_rank(
    request: dict[str, Any], rank: int, port: int, own: dict[str, str], live: Live
) -> NoReturn:
    """`own`: what the environment of this rank has beside or in place of the common one."""
    processes.die_with_parent()
    os.setsid()
    names = {**environment(request, rank, port), **own}
    del names["TORCHELASTIC_USE_AGENT_STORE"]  # rank 0 itself holds the store
    os.environ.update(names)
    processes.become(partial(live, request, rank), PROBE_FAILED)


def _watch(folder: Path, number: int, pids: dict[int, int], captures: Captures) -> None:
    """Until every rank has ended: beat, obey, and write how each ended."""
    asked: list[str] = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append("end"))
    beats, next_beat = 0, 0.0
    last, since = "", time.monotonic()
    while pids:
        captures.wait(_POLL)
        now = time.monotonic()
        if now >= next_beat:
            beats, next_beat = beats + 1, now + EACH
            place(folder / f"node{number}.beat", str(beats))
        said, order = (text_of(folder / name) for name in (BEAT, ORDERS))
        if said != last:
            last, since = said, now
        if order == "stacks" and "stacks" not in asked:
            asked.append("stacks")
            processes.ask_for_stacks(list(pids), captures.wait)
        if order == "end" or "end" in asked or now > since + ABANDONED or not folder.is_dir():
            asked.append("end")
            processes.end_below(processes.KILL_GRACE, wait=captures.wait, reap=False)
        while ended := _ended():
            if ended[0] in pids:
                rank = pids.pop(ended[0])
                exit_of = {
                    "rank": rank,
                    "code": ended[1],
                    "at": time.time(),
                    "killed": "end" in asked,
                }
                place(folder / f"rank{rank}.exit", json.dumps(exit_of))


def _ended() -> tuple[int, int] | None:
    """A child that has ended, and its exit code."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, os.waitstatus_to_exitcode(status)) if pid else None


def _address(host: str, nodes: int) -> str:
    """Where the other nodes reach this one."""
    if (given := os.environ.get("MASTER_ADDR", "127.0.0.1" if nodes == 1 else "")) != "":
        return given
    for name in (host.rpartition("@")[2], socket.gethostname()):
        address = _looked_up(name)
        if address and not address.startswith("127."):
            return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect(("192.0.2.1", 9))  # sends nothing: the kernel chooses the address
        return str(asked.getsockname()[0])


def _looked_up(name: str) -> str:
    """The address of a host by the system's own command; "" if it knows none, or there is no such
    command.
    """
    try:
        found = subprocess.run(
            ["getent", "ahostsv4", name], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return next(iter(found.stdout.split()), "")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])


def _rendezvous(folder: Path) -> dict[str, Any] | None:
    """Where the ranks meet, as soon as the node of rank 0 has written it; None if the run ends
    before.
    """
    beat, since = "", time.monotonic()
    while time.monotonic() < since + ABANDONED and text_of(folder / ORDERS) != "end":
        if text := text_of(folder / RENDEZVOUS):
            found: dict[str, Any] = json.loads(text)
            return found
        if (now := text_of(folder / BEAT)) != beat:
            beat, since = now, time.monotonic()
        time.sleep(_POLL)
    return None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
