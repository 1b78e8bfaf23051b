"""Which collective calls, steps and batches a rank has reached, in order, so that ranks can be
compared after a hang.

Each event is appended to `rank{r}.progress` with one small write, because a rank that hangs or is
killed can record nothing later. A line `+{...}` defines the next key: operation and the user's
frames, innermost first; a line `K` or `K VALUE` is an event of key K. Only calls of the script
itself count, not those inside a forward, a backward or another event.
"""

import functools
import json
import os
import threading
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..compat.names import LOADER_NEXT
from ..dispatcher import Call, Leave
from ..frames import running
from ..session import Session

_DEPTH = 8
_KEYS = 2000
# Calls at which ranks wait for one another; one that is missing here shows in no log of a hang.
_COLLECTIVES = (
    *(
        "all_reduce",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "barrier",
        "monitored_barrier",
    ),
    *(
        "broadcast",
        "broadcast_object_list",
        "scatter",
        "scatter_object_list",
        "gather",
        "gather_object",
    ),
    *(
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_to_all",
        "all_to_all_single",
    ),
)
_WATCHED = {
    "torch.distributed:": _COLLECTIVES,
    "torch.distributed.checkpoint.state_dict:": tuple(
        f"{verb}_{what}state_dict"
        for verb in ("get", "set")
        for what in ("model_", "optimizer_", "")
    ),
    "torch.distributed.checkpoint:": ("save", "async_save", "load"),
    "torch.nn.utils:": ("clip_grad_norm_",),
    "torch.distributed.tensor:DTensor.": ("full_tensor", "redistribute"),
    "torch.autograd:": ("backward",),
}


class Progress:
    """The log of one rank."""

    def __init__(self, session: Session) -> None:
        path = session.writer.path.with_suffix(".progress")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._owns = session.frames.owns
        self._process = os.getpid()
        self._thread = threading.main_thread().ident
        self._keys: dict[tuple[Any, ...], int] = {}
        self._session = session
        self.busy = False

    @property
    def listens(self) -> bool:
        """Whether an event here is one of the script's own: not within another, nor in a thread or
        a forked worker.
        """
        inside = self.busy or self._session.progress.depth > 0 or self._session.progress.in_backward
        return not inside and threading.get_ident() == self._thread and os.getpid() == self._process

    def log(self, operation: str, value: int | None = None) -> None:
        """Append one event.

        A signal handler that interrupts this logs nothing: keys are numbered in their order.
        """
        before, self.busy = self.busy, True
        try:
            self._append(operation, value)
        finally:
            self.busy = before

    def _append(self, operation: str, value: int | None) -> None:
        frames = list(islice((line for line in running() if self._owns(line[0])), _DEPTH))
        key = (operation, *frames)
        text = ""
        if key not in self._keys:
            if len(self._keys) >= _KEYS:
                return
            self._keys[key] = len(self._keys)
            text = f"+{json.dumps({'op': operation, 'frames': frames})}\n"
        text += f"{self._keys[key]}\n" if value is None else f"{self._keys[key]} {value}\n"
        os.write(self._file, text.encode())


def install(session: Session) -> None:
    """Log the events of this rank in runs of the script as it is: not in a DDP run, nor in a single
    process.
    """
    if session.request.mode not in ("fsdp", "survey"):
        return
    progress = Progress(session)

    def leave() -> None:
        progress.busy = False

    def before(call: Call, name: str) -> Leave | None:
        if not progress.listens or (
            # A DTensor that every rank holds whole needs no other rank: rank 0 alone may read it.
            name in ("full_tensor", "redistribute") and _is_whole(call.args[0])
        ):
            return None
        progress.log(name)
        progress.busy = True
        return leave

    for prefix, names in _WATCHED.items():
        for name in names:
            operation = f"dcp.{name}" if prefix == "torch.distributed.checkpoint:" else name
            session.around(
                prefix + name, before=functools.partial(before, name=operation), optional=True
            )
    _watch_models(session, progress)
    _watch_loaders(session, progress)


def _is_whole(tensor: DTensor) -> bool:
    """Whether every rank has the whole tensor, so that none waits for another."""
    return all(placement.is_replicate() for placement in tensor.placements)


def _watch_models(session: Session, progress: Progress) -> None:
    sharded: dict[int, bool] = {}

    def called(module: nn.Module, given: Any) -> None:
        if progress.listens:
            if not sharded.get(id(module)):
                sharded[id(module)] = any(isinstance(m, FSDPModule) for m in module.modules())
            if sharded[id(module)]:
                progress.log("forward")

    def stepping(optimizer: torch.optim.Optimizer, closure: bool) -> None:
        if progress.listens:
            progress.log("step")

    session.subscribe("call", called)
    session.subscribe("stepping", stepping)


def _watch_loaders(session: Session, progress: Progress) -> None:
    taken: dict[int, int] = {}

    def begins(call: Call) -> None:
        if progress.listens:
            try:
                progress.log("data", len(call.args[0]))
            except TypeError:
                progress.log("data")

    def begun(call: Call) -> None:
        taken[id(call.result)] = 0

    def following(call: Call) -> Leave:
        iterator = call.args[0]

        def leave() -> None:
            if call.failed is None:
                taken[id(iterator)] = taken.get(id(iterator), 0) + 1
            elif issubclass(call.failed, StopIteration) and progress.listens:
                progress.log("end of data", taken.pop(id(iterator), 0))

        return leave

    session.around("torch.utils.data:DataLoader.__iter__", before=begins, after=begun)
    session.around(LOADER_NEXT, before=following)
