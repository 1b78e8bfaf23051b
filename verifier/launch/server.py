"""The launcher process: reads one request a line on stdin, forks its ranks, watches them, answers one line on stdout.

A request is a `Request` (request.py) as JSON. The ranks get the environment that torchrun gives; the rendezvous store
lives in a process of its own on a port that the system picks. Forking saves the import of torch in every rank, and waiting
for the ranks ourselves gives the exact exit status of each, in the order in which they ended; torchrun tells neither.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from typing import Any

from . import processes

FREE_PORT = 0


def serve(device: str, ranks: int) -> int:
    """Answer requests until stdin closes. With device "auto" the ranks see GPUs if there is one for each of `ranks`."""
    processes.adopt_orphans()
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        versions = _import_torch()
    except ImportError as error:
        _answer(answers, {"fault": "no torch", "message": str(error)})
        return 1
    if device == "auto" and 0 < versions["devices"] < ranks:
        os.dup2(answers.fileno(), 1)
        os.execv(sys.executable, [sys.executable, "-u", sys.argv[0], "cpu", str(ranks)])
    _answer(answers, versions)
    for line in sys.stdin:
        _answer(answers, _run(json.loads(line)))
    return 0


def _import_torch() -> dict[str, Any]:
    """Import what nearly every rank would import anew: torch._dynamo alone (any optimizer needs it) takes over a second."""
    import torch
    import torch._dynamo
    import torch.distributed
    import torch.distributed.checkpoint.filesystem
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.utils.checkpoint

    from ..probe import rank  # noqa: F401  (its imports must be made before the fork)

    if not torch.distributed.is_available():
        raise ImportError("this torch was built without torch.distributed")
    return {
        "torch": torch.__version__,
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "cuda": torch.version.cuda if torch.cuda.device_count() else None,
        "devices": torch.cuda.device_count(),
    }


def _answer(stream: Any, value: dict[str, Any]) -> None:
    stream.write(json.dumps(value) + "\n")
    stream.flush()


def _run(request: dict[str, Any]) -> dict[str, Any]:
    sys.stdout.flush()
    sys.stderr.flush()
    started = time.monotonic()
    alone = request["mode"] == "simulate"
    try:
        port = 0 if alone else _fork_store()
    except OSError as error:
        return {"fault": "no sockets", "message": str(error)}
    ranks: dict[int, int] = {}
    for rank in range(1 if alone else request["world_size"]):
        pid = os.fork()
        if pid == 0:
            _be_rank(request, rank, port)
        ranks[pid] = rank
    try:
        ended, timed_out = _watch(ranks, request, started)
    finally:
        processes.end_all(processes.descendants(os.getpid()), grace=0.0)  # one run at a time: all are of this run
    return {"ranks": ended, "timed_out": timed_out, "seconds": time.monotonic() - started}


def _be_rank(request: dict[str, Any], rank: int, port: int) -> None:
    code = 70
    try:
        processes.die_with_parent()
        world = str(request["world_size"])
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            GROUP_RANK="0",
            ROLE_RANK=str(rank),
            ROLE_NAME="default",
            WORLD_SIZE=world,
            LOCAL_WORLD_SIZE=world,
            GROUP_WORLD_SIZE="1",
            ROLE_WORLD_SIZE=world,
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TORCHELASTIC_USE_AGENT_STORE="True",
            TORCHELASTIC_RUN_ID="none",
            TORCHELASTIC_RESTART_COUNT="0",
            TORCHELASTIC_MAX_RESTARTS="0",
        )
        import torch

        torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
        from ..probe.rank import run

        code = run(request, rank)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        processes.leave(code)


def _fork_store() -> int:
    """The port of the rendezvous store, which a process of its own holds."""
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
    if not text.isdigit():
        processes.end_all([pid], grace=0.0)
        raise OSError(text.removeprefix("!") or "the store process died")
    return int(text)


def _watch(ranks: dict[int, int], request: dict[str, Any], started: float) -> tuple[list[dict[str, Any]], bool]:
    """Wait for every rank. After a failure the others get `grace` seconds; after `timeout` all are asked for their stacks."""
    alive = dict(ranks)
    ended: list[dict[str, Any]] = []
    deadline = started + request["timeout"]
    killed = failed = False
    while alive:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid in alive:
            code = os.waitstatus_to_exitcode(status)
            ended.append({"rank": alive.pop(pid), "code": code, "at": time.monotonic(), "killed": killed})
            if code != 0 and not killed:
                failed = True
                deadline = min(deadline, time.monotonic() + request["grace"])
            continue
        if pid == 0:
            if select.select([sys.stdin], [], [], 0.02)[0]:  # a client sends one request at a time: this is its end
                processes.end_all(list(alive), grace=0.0)
                sys.exit(1)
            if time.monotonic() > deadline and not killed:
                killed = True
                from ..probe.rank import STACKS_SIGNAL

                for pid in alive:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, STACKS_SIGNAL)
                time.sleep(0.3)
                processes.end_all(list(alive), grace=2.0, reap=False)
    return ended, killed and not failed
