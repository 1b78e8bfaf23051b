"""The launcher process: reads one request a line on stdin, forks a manager for each run, answers
one line on stdout.

A request is a `Request` (request.py) as JSON with a `number`, which its answer repeats: several
runs may go on at a time. Forking saves the import of torch in every rank. A manager (manager.py)
adopts all that its run starts, so it can end all of it.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import select
import socket
import sys
import traceback
import weakref
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import starving, text_of
from ..isolation.choose import Trial, Wish
from . import manager, processes
from .request import ONE_PROCESS, Live

_CHUNK = 65536
OLDEST = (2, 6)  # the first minor version of torch with `torch.distributed.fsdp.fully_shard`


def serve(
    device: str,
    ranks: int,
    live: Live,
    prepare: Callable[[], None],
    wish: str = "",
    unused: int = 0,
) -> int:
    """Answer requests until stdin closes.

    With device "auto" the ranks see GPUs if there is one for each of `ranks`; those that are too
    few for that are counted in `unused` when it starts itself again without them. `wish`: how runs
    are to be isolated (`choose.Wish`).

    `live` is what a rank does. `prepare` imports once, beside torch, what every rank would import
    again; it raises if this version of torch lacks a name that the probe needs.
    """
    # the import of torch may take long, and no request is read meanwhile
    processes.die_with_parent()
    if _is_alone():
        return 1
    processes.adopt_orphans()
    trial = Trial(Wish.of(wish)) if wish else None
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    versions = _loaded(prepare)
    if "fault" in versions:
        _answer(answers, versions)
        return 1
    if device == "auto" and 0 < versions["devices"] < ranks:
        if trial is not None:
            trial.end()
        os.dup2(answers.fileno(), 1)
        again = ["cpu", str(ranks), wish, str(versions["devices"])]
        os.execv(sys.executable, [sys.executable, "-u", sys.argv[0], *again])
    processes.outlive_parent()
    isolation = asdict(trial.choice()) if trial is not None else {}
    _answer(answers, {**versions, "unused": unused, "isolation": isolation})
    _Server(answers, live, spare=[isolation["holder"]] if isolation.get("holder") else []).loop()
    processes.end_below()
    # finalising an interpreter with torch takes long, and the client waits
    return processes.leave(0)


def _is_alone() -> bool:
    """Whether the client ended before `die_with_parent` took effect: then the other end of stdin is
    closed.
    """
    listener = select.poll()
    listener.register(0, 0)
    return bool(listener.poll(0))


def _loaded(prepare: Callable[[], None]) -> dict[str, Any]:
    """The versions of what was imported, or the fault that is the answer."""
    # all that the imports make stays: looking for garbage among it takes a sixth of their time
    gc.disable()
    try:
        versions = _import_torch()
    except Exception as error:
        return _fault("torch", error)
    try:
        prepare()
    except Exception as error:  # in the probe: a name that this version of torch does not have
        traceback.print_exc()
        return _fault("probe", error, f" (torch {versions['torch']})")
    gc.freeze()  # nor does a rank look among it
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        # nor take apart, at its end, the libraries of operators that torch has made
        finalizer.atexit = False
    gc.enable()
    return versions


def _fault(kind: str, error: Exception, about: str = "") -> dict[str, Any]:
    """Of the machine, if it refused what an import needs; otherwise of this kind."""
    if said := starving(text_of(error)):
        return {"fault": "machine", "message": said}
    return {"fault": kind, "message": f"{text_of(error)}{about}"}


def _import_torch() -> dict[str, Any]:
    """Import what nearly every rank would import: torch._dynamo alone (any optimizer needs it)
    takes over a second.
    """
    import torch
    import torch.distributed

    if not torch.distributed.is_available():
        raise ImportError("this torch was built without torch.distributed")
    if (known := _installed_torch()) and known != torch.__version__.partition("+")[0]:
        where = Path(torch.__file__).parent
        raise ImportError(
            f"two torches: {where} is {torch.__version__}, the installed package is {known}; remove"
            " one of them"
        )
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST:
        raise ImportError(
            f"torch {torch.__version__} is too old: {'.'.join(map(str, OLDEST))} or later is needed"
        )
    import torch.distributed.checkpoint.filesystem
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.utils.checkpoint

    return {
        "torch": torch.__version__,
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "cuda": torch.version.cuda if torch.cuda.device_count() else None,
        "devices": torch.cuda.device_count(),
    }


def _installed_torch() -> str:
    """The version of the installed package without its build, "" if torch comes from elsewhere."""
    try:
        return importlib.metadata.version("torch").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return ""


def _answer(stream: Any, value: dict[str, Any]) -> None:
    stream.write(json.dumps(value) + "\n")
    stream.flush()


class _Server:
    """The runs that go on, each with its manager and the pipe on which that will answer."""

    def __init__(self, answers: Any, live: Live, spare: list[int]) -> None:
        self._answers, self._live, self._spare = answers, live, spare
        # pipe: number of the request, manager, the bytes of its answer
        self._runs: dict[int, tuple[int, int, bytes]] = {}

    def loop(self) -> None:
        """Until stdin ends, which means that the client is gone."""
        asked = b""
        while True:
            ready = select.select([0, *self._runs], [], [])[0]
            if 0 in ready:
                data = os.read(0, _CHUNK)
                if not data:
                    return
                *lines, asked = (asked + data).split(b"\n")
                for line in lines:
                    self._start(json.loads(line))
            for pipe in [p for p in ready if p != 0]:
                self._receive(pipe)

    def _start(self, request: dict[str, Any]) -> None:
        number = request["number"]
        if request["mode"] not in ONE_PROCESS and (fault := sockets_fault()):
            _answer(self._answers, {"number": number, "fault": "no sockets", "message": fault})
            return
        sys.stdout.flush()
        sys.stderr.flush()
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            processes.die_with_parent()
            for private in (reader, self._answers.fileno(), *self._runs):
                os.close(private)
            manager.be_manager(request, writer, self._live)
        os.close(writer)
        self._runs[reader] = (number, pid, b"")

    def _receive(self, pipe: int) -> None:
        number, pid, received = self._runs[pipe]
        data = os.read(pipe, _CHUNK)
        received += data
        self._runs[pipe] = (number, pid, received)
        if data and not data.endswith(b"\n"):
            return
        del self._runs[pipe]
        os.close(pipe)
        killed = os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        processes.end_below(spare=[*self._spare, *(other for _, other, _ in self._runs.values())])
        answer = {"fault": "killed" if killed else "the run's manager has died"}
        if received.endswith(b"\n"):
            answer = json.loads(received)
        _answer(self._answers, {"number": number, **answer})


def sockets_fault() -> str:
    """Why two processes cannot connect over the loopback interface; "" if they can."""
    try:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            with socket.create_connection(("127.0.0.1", server.getsockname()[1]), timeout=2.0):
                return ""
    except OSError as error:
        return str(error)
