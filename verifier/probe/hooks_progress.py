"""Which collective calls, steps and batches a rank has come to, in order, so that a hang can be told by comparing the ranks.

`rank{r}.progress` is appended to at each event, with one small write, because a rank that hangs or is killed can say nothing
later. A line `+{...}` defines the next key: operation and the user's frames, innermost first; a line `K` or `K VALUE` is an
event of key K. Only what the script itself calls counts: what runs inside a forward, a backward or another event does not.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dsd
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from ..origin import is_user
from . import torchlib
from .session import Session

_DEPTH = 8
_KEYS = 2000
_COLLECTIVES = (
    *("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "barrier", "monitored_barrier"),
    *("broadcast", "broadcast_object_list", "scatter", "scatter_object_list", "gather", "gather_object"),
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single"),
)
_STATES = tuple(f"{verb}_{what}state_dict" for verb in ("get", "set") for what in ("model_", "optimizer_", ""))


class Progress:
    """The log of one rank."""

    def __init__(self, session: Session) -> None:
        path = session.recorder.path.with_suffix(".progress")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._project = session.recorder.project + os.sep
        self._process = os.getpid()
        self._thread = threading.main_thread().ident
        self._keys: dict[tuple[Any, ...], int] = {}
        self._session = session
        self.busy = False

    @property
    def listens(self) -> bool:
        """Whether an event here is one of the script's own: not within another, nor in a thread or a forked worker."""
        inside = self.busy or self._session.depth > 0 or self._session.in_backward
        return not inside and threading.get_ident() == self._thread and os.getpid() == self._process

    def log(self, operation: str, value: int | None = None) -> None:
        """Append one event. A signal handler that interrupts this logs nothing of its own: the numbers of keys are their order."""
        before, self.busy = self.busy, True
        try:
            self._append(operation, value, sys._getframe(2))
        finally:
            self.busy = before

    def _append(self, operation: str, value: int | None, frame: FrameType | None) -> None:
        frames: list[tuple[str, int, str]] = []
        while frame is not None and len(frames) < _DEPTH:
            code = frame.f_code
            if code.co_filename.startswith(self._project) and is_user(code.co_filename):
                frames.append((code.co_filename, frame.f_lineno, code.co_name))
            frame = frame.f_back
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
    """Log the events of this rank; not in a reference run, where DDP stands in, and not where there is one process."""
    if session.request["mode"] != "fsdp":
        return
    progress = Progress(session)
    for place in (dist, dist.distributed_c10d):
        for name in _COLLECTIVES:
            setattr(place, name, _heard(progress, name, getattr(place, name)))
    for name in _STATES:
        setattr(dsd, name, _heard(progress, name, getattr(dsd, name)))
    for name in ("save", "async_save", "load"):
        setattr(dcp, name, _heard(progress, f"dcp.{name}", getattr(dcp, name)))
    clip = _heard(progress, "clip_grad_norm_", nn.utils.clip_grad_norm_)
    for holder in ("torch.nn.utils", "torch.nn.utils.clip_grad"):
        sys.modules[holder].clip_grad_norm_ = clip  # type: ignore[attr-defined]
    for name in ("full_tensor", "redistribute"):
        setattr(DTensor, name, _heard(progress, name, getattr(DTensor, name)))
    torch.autograd.backward = _heard(progress, "backward", torch.autograd.backward)
    _listen_to_models(session, progress)
    _listen_to_loaders(progress)


def _heard(progress: Progress, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def called(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not progress.listens:
            return real(*args, **kwargs)
        progress.log(name)
        progress.busy = True
        try:
            return real(*args, **kwargs)
        finally:
            progress.busy = False

    return called


def _listen_to_models(session: Session, progress: Progress) -> None:
    on_call, on_step = session.on_call, session.on_step
    sharded: dict[int, bool] = {}

    def called(module: nn.Module, arguments: Callable[[], list[Any]]) -> None:
        if progress.listens:
            if not sharded.get(id(module)):
                sharded[id(module)] = any(isinstance(m, FSDPModule) for m in module.modules())
            if sharded[id(module)]:
                progress.log("forward")
        on_call(module, arguments)

    def stepped(optimizer: torch.optim.Optimizer, closure: bool) -> None:
        if progress.listens:
            progress.log("step")
        on_step(optimizer, closure)

    session.on_call = called  # type: ignore[method-assign]
    session.on_step = stepped  # type: ignore[method-assign]


def _listen_to_loaders(progress: Progress) -> None:
    begin, following = DataLoader.__iter__, torchlib.LoaderIterator.__next__
    taken: dict[int, int] = {}

    @functools.wraps(begin)
    def begun(loader: Any) -> Any:
        if progress.listens:
            try:
                progress.log("data", len(loader))
            except TypeError:
                progress.log("data")
        iterator = begin(loader)
        taken[id(iterator)] = 0
        return iterator

    @functools.wraps(following)
    def next_batch(iterator: Any) -> Any:
        try:
            batch = following(iterator)
        except StopIteration:
            if progress.listens:
                progress.log("end of data", taken.pop(id(iterator), 0))
            raise
        taken[id(iterator)] = taken.get(id(iterator), 0) + 1
        return batch

    DataLoader.__iter__ = begun  # type: ignore[method-assign]
    torchlib.LoaderIterator.__next__ = next_batch  # type: ignore[method-assign, assignment]
