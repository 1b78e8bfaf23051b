"""One run, in a process of its own: forks the rendezvous store and the ranks, waits for them, and
ends all that they started.

The ranks get the environment that torchrun gives. Waiting for them ourselves gives the exact exit
status of each, in the order in which they ended; torchrun reports neither. For the real torchrun
see torchrun.py.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ..errors import PROBE_FAILED, text_of
from ..isolation.enter import enter
from ..isolation.world import World
from . import cluster, command, devices, processes, sharing, torchrun
from .capture import Captures
from .checkpoints import damage
from .request import ONE_PROCESS, Live

FREE_PORT = 0
_NEVER = 3600.0


def be_manager(request: dict[str, Any], pipe: int, live: Live) -> NoReturn:
    """Make the run, write its answer as one line into `pipe`, end this process."""
    try:
        world = World.of(request["world"]) if request["world"] else None
        if world is not None:
            enter(world, request["folder"])
    except OSError as error:
        message = f"a run cannot be isolated ({world.mechanism if world else ''}): {text_of(error)}"
        os.write(pipe, json.dumps({"fault": "machine", "message": message}).encode() + b"\n")
        processes.leave(0)
    # again, since the world may have changed the parent and the rights of this process
    processes.die_with_parent()
    processes.adopt_orphans()

    def manage() -> int:
        try:
            answer = _answer(request, pipe, live)
            with os.fdopen(pipe, "w") as stream:
                stream.write(json.dumps(answer) + "\n")
            return 0
        finally:
            processes.end_below()

    processes.become(manage, 1)


def _answer(request: dict[str, Any], pipe: int, live: Live) -> dict[str, Any]:
    """Do what a request asks for, to its end.

    `note`: what was damaged before, "" if nothing could be.
    """
    if request["command"]:
        return command.run(request)
    note = damage(**request["damage"]) if request["damage"] else ""
    if request["damage"] and not note:
        return {"note": "", "ranks": [], "timed_out": False, "seconds": 0.0}
    if request["launcher"] == "fork" or request["mode"] in ONE_PROCESS or request["open"]:
        return {"note": note, **run(request, pipe, live)}
    far = torchrun.run if request["launcher"] == "torchrun" else cluster.run
    return {"note": note, **far(request)}


def run(request: dict[str, Any], private: int, live: Live) -> dict[str, Any]:
    """The answer to a request: how each rank ended.

    `private` is a file descriptor that the ranks must not have.
    """
    started = time.monotonic()
    alone = request["mode"] in ONE_PROCESS
    try:
        port = 0 if alone else _fork_store()
    except OSError as error:
        return {"fault": "no sockets", "message": str(error)}
    captures = Captures()
    ranks: dict[int, int] = {}
    for rank in range(1 if alone else request["world_size"]):
        pid = captures.fork(request["folder"], f"rank{rank}")
        if pid == 0:
            os.close(private)
            processes.become(partial(_be_rank, request, rank, port, live), PROBE_FAILED)
        ranks[pid] = rank
    try:
        ended, timed_out, quiet, busy = _watch(ranks, request, started, captures.wait)
    finally:
        processes.end_below(wait=captures.wait)
        captures.close()
    seconds = time.monotonic() - started
    return {
        "ranks": ended,
        "timed_out": timed_out,
        "quiet": quiet,
        "busy": busy,
        "seconds": seconds,
    }


def environment(request: dict[str, Any], rank: int, port: int) -> dict[str, str]:
    """What torchrun puts into the environment of a rank."""
    world = str(request["world_size"])
    names = {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), world),
        "LOCAL_WORLD_SIZE": str(
            min(request["world_size"], request["per_node"] or request["world_size"])
        ),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCHELASTIC_ERROR_FILE": str(Path(request["folder"], f"rank{rank}.error.json")),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    if request["mode"] in ONE_PROCESS:  # there is no store to ask
        del names["TORCHELASTIC_USE_AGENT_STORE"]
    if not request["backend"] and not request["devices"]:
        return names
    import torch

    total, visible = torch.cuda.device_count(), os.environ.get(devices.VARIABLE)
    own = devices.environment(request["devices"], total, visible)
    if not request["backend"]:
        return {**names, **own}
    number = len(request["devices"]) or total
    return {
        **names,
        **sharing.environment(
            rank, request["world_size"], number, own.get(devices.VARIABLE, visible)
        ),
    }


def _be_rank(request: dict[str, Any], rank: int, port: int, live: Live) -> int:
    processes.die_with_parent()
    os.setsid()
    os.environ.update(environment(request, rank, port))
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return live(request, rank)


def _fork_store(attempts: int = 3) -> int:
    """The port of the rendezvous store, which a process of its own holds.

    It has been seen to die as it starts.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        processes.die_with_parent()
        os.close(reader)
        try:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            store = TCPStore("127.0.0.1", FREE_PORT, is_master=True, wait_for_workers=False)
            os.write(writer, str(store.port).encode())
            os.close(writer)
            signal.pause()
        except BaseException as error:
            os.write(writer, f"!{error}".encode())
        finally:
            processes.leave(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    if text.isdigit():
        return int(text)
    if not text and attempts > 1:
        return _fork_store(attempts - 1)
    raise OSError(text.removeprefix("!") or f"the store process died ({os.waitpid(pid, 0)[1]})")


def _watch(
    ranks: dict[int, int], request: dict[str, Any], started: float, wait: Callable[[float], object]
) -> tuple[list[dict[str, Any]], bool, float, list[int]]:
    """Wait for every rank.

    After a failure the others get `grace` seconds; after `timeout` all are asked for their stacks.

    How each ended, whether the time was over, for how many seconds then no rank had recorded
    anything, and which ranks computed.
    """
    alive = dict(ranks)
    ended: list[dict[str, Any]] = []
    deadline = started + request["timeout"]
    killed = failed = False
    quiet, busy = 0.0, list[int]()
    while alive:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid in alive:
            code = os.waitstatus_to_exitcode(status)
            ended.append(
                {"rank": alive.pop(pid), "code": code, "at": time.time(), "killed": killed}
            )
            if code != 0 and not killed:
                failed = True
                deadline = min(deadline, time.monotonic() + request["grace"])
        elif pid == 0 and killed:
            wait(0.1)
        elif pid == 0 and time.monotonic() <= deadline:
            wait(min(deadline - time.monotonic(), _NEVER))
        elif pid == 0:
            killed, quiet = True, _quiet(Path(request["folder"]))
            busy = (
                []
                if failed or _on_gpus()
                else [alive[pid] for pid in processes.at_work(list(alive), wait)]
            )
            processes.ask_for_stacks(list(alive), wait)
            processes.end_below(processes.KILL_GRACE, wait=wait, reap=False)
    return ended, killed and not failed, quiet, busy


def _on_gpus() -> bool:
    """Whether ranks may wait for a GPU, which uses a core, too."""
    import torch

    return torch.cuda.device_count() > 0


def _quiet(folder: Path) -> float:
    """For how many seconds no rank has recorded anything."""
    records = [
        file for pattern in ("rank*.jsonl", "rank*.progress") for file in folder.glob(pattern)
    ]
    return time.time() - max((file.stat().st_mtime for file in records), default=0.0)
