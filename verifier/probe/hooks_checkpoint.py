"""Where the probe listens to checkpoints: what is given to a save, where it goes, what a load asks for and gets."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dsd
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from . import crash, torchlib
from .guard import guard_methods
from .saving import entries, held, place_of
from .session import Session

_RACE_SECONDS = 0.3
_NAMES = 200


class Listener:
    """Listens to the checkpoints of one rank. What runs inside a checkpoint function of torch is no call of the script's."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.inside = threading.local()
        self.calls = 0
        self.watch: bool = session.request["watch_saves"]
        self.pending: list[tuple[Any, list[Any], dict[str, Any] | None]] = []
        self.targets: set[str] = set()

    def heard(self, operation: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """`real`, and a record of each call by the script."""

        @functools.wraps(real)
        def done(*args: Any, **kwargs: Any) -> Any:
            if getattr(self.inside, "operation", None) is not None or _by_pickle(args):
                return real(*args, **kwargs)
            if self.session.recorder.here() is None:
                return real(*args, **kwargs)
            target = self.target(operation, args, kwargs)
            given = args[0] if args else kwargs.get("state_dict", kwargs.get("obj"))
            keys = list(_keys(given)) if isinstance(given, dict) else []
            self.session.on_checkpoint(operation, target, keys[:_NAMES])
            self.inside.operation = (operation, target, kwargs)
            try:
                if operation == "torch.save" and target:
                    self.saving(given)
                    crash.in_file(self.session, self.calls, real, given, target)
                    self.let_training_go_on()
                result = real(*args, **kwargs)
            finally:
                self.inside.operation = None
            if operation == "async_save":
                self.started(result, kwargs.get("process_group"))
            return result

        return done

    @staticmethod
    def target(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Where a save goes to or a load comes from, as an absolute path; "" if it is no file."""
        if operation == "torch.save":
            return place_of(args[1] if len(args) > 1 else kwargs.get("f"))
        if operation == "torch.load":
            return place_of(args[0] if args else kwargs.get("f"))
        if operation not in ("save", "async_save", "load"):
            return ""
        storage = kwargs.get("storage_writer") or kwargs.get("storage_reader")
        return place_of(kwargs.get("checkpoint_id") or storage)

    def saving(self, state: object) -> None:
        """`state` is about to be saved by the function that the script has called."""
        operation = getattr(self.inside, "operation", None)
        if operation is None or not self.watch:
            return
        self.calls += 1
        name, target, options = operation
        self.targets.add(target)
        crash.arm(self.session, self.calls, target)
        with torch.no_grad():
            self.session.recorder.write(
                "saving",
                op=name,
                call=self.calls,
                after_step=self.session.step_number() - 1,
                to=target,
                main=threading.current_thread() is threading.main_thread(),
                alone=bool(options.get("no_dist")) or _smaller(options.get("process_group")),
                entries=entries(state),
                random=entries(torch.get_rng_state()).get("", {}).get("sketch"),
                at_line=self.session.recorder.here(),
                **held(self.session),
            )

    def let_training_go_on(self) -> None:
        """In a background thread: write only when the main thread has made its next step, so that a race shows."""
        if not self.watch or threading.current_thread() is threading.main_thread():
            return
        step, until = self.session.step_number(), time.monotonic() + _RACE_SECONDS
        while self.session.step_number() == step and time.monotonic() < until:
            time.sleep(0.002)

    def started(self, result: Any, group: Any) -> None:
        """An asynchronous save is on its way, with collectives on `group`."""
        future = getattr(result, "upload_completion", result)
        own = group if group is not None else dist.group.WORLD
        if self.watch and own is not None and dist.is_initialized():
            self.pending.append((future, [own], self.session.recorder.here()))

    def collective(self, groups: Callable[[], list[Any]], what: str) -> None:
        """The main thread is about to use these groups: is a save in flight on one of them?"""
        self.pending = [item for item in self.pending if not item[0].done()]
        if not self.pending or threading.current_thread() is not threading.main_thread():
            return
        used = groups()
        for item in [i for i in self.pending if any(g is own for g in used for own in i[1])]:
            self.pending.remove(item)
            apart = len(set(_backends(item[1][0]))) > 1
            self.session.recorder.write(
                "save_in_flight", what=what, saved_line=item[2], apart=apart, at_line=self.session.recorder.here()
            )

    def renamed(self, source: object, target: object) -> None:
        """A path has another name now; recorded if something was saved there."""
        old, new = place_of(source), place_of(target)
        if self.watch and any(t == old or t.startswith(old + os.sep) for t in self.targets):
            self.targets.add(new)
            self.session.recorder.write("renamed", old=old, new=new)


def _by_pickle(args: tuple[Any, ...]) -> bool:
    """Whether `torch.save` or `torch.load` is only the way in which Python writes a storage, as in `all_gather_object` of a tensor."""
    stored = bool(args) and isinstance(args[0], torch.UntypedStorage | torch.TypedStorage)
    return stored or sys._getframe(2).f_code.co_name == "_load_from_bytes"


def install(session: Session) -> None:
    """Listen to saves, loads and the state-dict helpers."""
    listener = Listener(session)
    guard_methods(session.recorder, listener, ("saving", "let_training_go_on", "started", "collective", "renamed"))
    for name, homes in (
        ("save", (dcp, state_dict_saver)),
        ("async_save", (dcp, state_dict_saver)),
        ("load", (dcp, state_dict_loader)),
    ):
        heard = listener.heard(name, getattr(dcp, name))
        for home in homes:
            setattr(home, name, heard)
    for name in ("set_model_state_dict", "set_optimizer_state_dict", "set_state_dict"):
        setattr(dsd, name, listener.heard(name, getattr(dsd, name)))
    for name in ("save", "load"):
        setattr(torch, name, listener.heard(f"torch.{name}", getattr(torch, name)))
    torchlib.listen_to_saved_dicts(listener.saving)
    _listen_to_templates(session)
    _listen_to_lenient_loads(session)
    if session.request["watch_saves"]:
        _listen_to_flight(session, listener)
        _listen_to_renames(listener)
        crash.install(session, listener.let_training_go_on)


def _listen_to_templates(session: Session) -> None:
    """What the state-dict helpers give back: entries of optimizer state, bytes of whole tensors."""
    busy = False

    def heard(operation: str, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def got(*args: Any, **kwargs: Any) -> Any:
            nonlocal busy
            if busy:
                return real(*args, **kwargs)
            busy = True
            try:
                given = kwargs.get("optimizers", args[1] if len(args) > 1 else ())
                optimizers = [given] if isinstance(given, torch.optim.Optimizer) else list(given or ())
                before = {
                    "had_state": any(o.state for o in optimizers),
                    "had_grads": any(
                        p.grad is not None for o in optimizers for group in o.param_groups for p in group["params"]
                    ),
                }
                result = real(*args, **kwargs)
            finally:
                busy = False
            session.recorder.write(
                "template",
                op=operation,
                step=session.step_number(),
                full=bool(getattr(kwargs.get("options"), "full_state_dict", False)),
                offload=bool(getattr(kwargs.get("options"), "cpu_offload", False)),
                optimizers=len(optimizers),
                states=_states(operation, result),
                bytes=_bytes(result),
                at_line=session.recorder.here(),
                **before,
            )
            return result

        return got

    for name in ("get_model_state_dict", "get_optimizer_state_dict", "get_state_dict"):
        setattr(dsd, name, heard(name, getattr(dsd, name)))


def _states(operation: str, result: Any) -> int | None:
    """How many parameters have optimizer state in what a helper gave back."""
    if operation == "get_model_state_dict":
        return None
    state = result[1] if operation == "get_state_dict" else result
    if "state" in state:
        return sum(1 for value in state["state"].values() if value)
    return sum(1 for key in state if str(key).startswith("state."))


def _bytes(result: Any) -> int:
    tensors = [t for t in torchlib.leaves(result) if isinstance(t, torch.Tensor)]
    return sum(torchlib.local(t).numel() * t.element_size() for t in tensors)


def _listen_to_lenient_loads(session: Session) -> None:
    """Loads that were told to accept missing keys, and what they did not find."""
    set_up = DefaultLoadPlanner.set_up_planner
    load = nn.Module.load_state_dict

    @functools.wraps(set_up)
    def planned(self: DefaultLoadPlanner, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        set_up(self, state_dict, metadata, is_coordinator)
        if getattr(self, "allow_partial_load", False) and metadata is not None:
            stored, wanted = set(metadata.state_dict_metadata), set(self.state_dict)
            _lenient(session, "allow_partial_load=True", wanted, wanted - stored, stored - wanted)

    @functools.wraps(load)
    def loaded(module: nn.Module, state_dict: Any, strict: bool = True, *args: Any, **kwargs: Any) -> Any:
        result = load(module, state_dict, strict, *args, **kwargs)
        if not strict and result is not None:
            names = {name for name, _ in module.named_parameters()}
            _lenient(session, "strict=False", names, set(result.missing_keys), set(result.unexpected_keys))
        return result

    DefaultLoadPlanner.set_up_planner = planned  # type: ignore[method-assign]
    nn.Module.load_state_dict = loaded  # type: ignore[method-assign, assignment]


def _lenient(session: Session, how: str, wanted: set[str], missing: set[str], unused: set[str]) -> None:
    session.recorder.write(
        "lenient",
        how=how,
        wanted=len(wanted),
        names=sorted(wanted)[:_NAMES],
        missing_count=len(missing),
        missing=sorted(missing)[:_NAMES],
        unused_count=len(unused),
        unused=sorted(unused)[:_NAMES],
        step=session.step_number(),
        at_line=session.recorder.here(),
    )


def _listen_to_flight(session: Session, listener: Listener) -> None:
    """Collectives of the main thread: the forward of a sharded model, and the functions of torch.distributed."""
    call = nn.Module.__call__

    @functools.wraps(call)
    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if listener.pending and session.depth == 0 and not torch.compiler.is_compiling():
            listener.collective(lambda: torchlib.mesh_groups(module), "a forward of the sharded model")
        return call(module, *args, **kwargs)

    nn.Module.__call__ = called  # type: ignore[method-assign]

    def heard(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def used(*args: Any, **kwargs: Any) -> Any:
            if listener.pending:
                given = [value for value in (*args, *kwargs.values()) if isinstance(value, dist.ProcessGroup)]
                listener.collective(lambda: given or [dist.group.WORLD], f"dist.{name}")
            return real(*args, **kwargs)

        return used

    for name in ("barrier", "all_reduce", "broadcast", "all_gather_object", "gather_object", "broadcast_object_list"):
        setattr(dist, name, heard(name, getattr(dist, name)))


def _listen_to_renames(listener: Listener) -> None:
    def heard(real: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(real)
        def done(source: Any, target: Any, **options: Any) -> None:
            real(source, target, **options)
            listener.renamed(source, target)

        return done

    os.rename, os.replace = heard(os.rename), heard(os.replace)


def _smaller(group: Any) -> bool:
    """Whether a group leaves out ranks."""
    return group is not None and dist.is_initialized() and dist.get_world_size(group) < dist.get_world_size()


def _backends(group: Any) -> list[str]:
    """The backend of each device type of a group, as `cpu:gloo,cuda:nccl` names them."""
    try:
        return [part.partition(":")[2] for part in dist.get_backend_config(group).split(",")]
    except (RuntimeError, ValueError):
        return []


def _keys(state: dict[Any, Any]) -> Iterable[str]:
    for key, value in state.items():
        yield str(key)
        if isinstance(value, dict):
            yield from (f"{key}.{inner}" for inner in list(value)[:50])
