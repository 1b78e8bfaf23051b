"""Checkpoint functions that the script calls: which, where to, and what a save is given."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ...trace.events import Checkpoint, Saving, SetState
from .. import crash, outputs
from ..compat.names import SAVED_DICT
from ..dispatcher import Call, Leave
from ..frames import caller
from ..saving import entries, entry, held, place_of
from ..session import Session
from .flight import Flight

_RACE_SECONDS = 0.3
_DCP = "torch.distributed.checkpoint"
_OPERATIONS = {
    **{f"{_DCP}:{name}": name for name in ("save", "async_save", "load")},
    **{
        f"{_DCP}.state_dict:{name}": name
        for name in ("set_model_state_dict", "set_optimizer_state_dict", "set_state_dict")
    },
    **{f"torch:{name}": f"torch.{name}" for name in ("save", "load")},
}

_SETTERS = ("set_model_state_dict", "set_state_dict")


class Checkpoints:
    """The checkpoints of one rank. What runs inside a checkpoint function of torch is no call of the script's."""

    def __init__(self, session: Session, flight: Flight) -> None:
        self.session = session
        self.flight = flight
        self.inside = threading.local()  # operation: the call of the script that this thread is in
        self.calls = 0
        self.watch: bool = session.request["watch_saves"]

    def watched(self, operation: str) -> Callable[[Call], Leave | None]:
        """What to do before and after an operation."""

        def before(call: Call) -> Leave | None:
            around = getattr(self.inside, "operation", None)
            if around is not None or _by_pickle(call):
                if around is not None and around[0] == "load" and operation in _SETTERS:  # of a Stateful of the script
                    self._set_state(operation, call)
                return None
            place = self.session.here()
            if place is None:
                return None
            target = _target(operation, call)
            if operation == "torch.save":
                outputs.about_to_write(target)
            self.session.write(
                Checkpoint(op=operation, after_step=self.session.step_number() - 1, to=target, at_line=place)
            )
            if operation in _SETTERS:
                self._set_state(operation, call)
            self.inside.operation = (operation, target, call.kwargs)

            def leave() -> None:
                self.inside.operation = None
                if operation == "async_save" and call.failed is None:
                    self.flight.started(call.result, call.kwargs.get("process_group"))

            if operation == "torch.save" and target:
                self._file(call.given(0, "obj"), target)
            return leave

        return before

    def _set_state(self, operation: str, call: Call) -> None:
        """What this rank hands to a setter, before it runs: on one rank alone it waits for ever."""
        model_first = operation == "set_model_state_dict"
        given = call.given(1, "model_state_dict") if model_first else call.kwargs.get("model_state_dict")
        if isinstance(given, dict):
            broadcast = bool(getattr(call.kwargs.get("options"), "broadcast_from_rank0", False))
            self.session.write(
                SetState(op=operation, given=len(given), broadcast=broadcast, at_line=self.session.here())
            )

    def _file(self, given: object, target: str) -> None:
        try:
            self.saving(given)
            crash.in_file(self.session, self.calls, given, target)
        except Exception as error:
            self.session.report("checkpoints.saving", error)
        self.let_training_go_on()

    def saving(self, state: object) -> None:
        """`state` is about to be saved by the function that the script has called."""
        operation = getattr(self.inside, "operation", None)
        if operation is None or not self.watch:
            return
        self.calls += 1
        name, target, options = operation
        self.flight.targets.add(target)
        crash.arm(self.session, self.calls, target)
        with torch.no_grad():
            weights, optimizer = held(self.session)
            self.session.write(
                Saving(
                    op=name,
                    call=self.calls,
                    after_step=self.session.step_number() - 1,
                    to=target,
                    main=threading.current_thread() is threading.main_thread(),
                    alone=bool(options.get("no_dist")) or _smaller(options.get("process_group")),
                    entries=entries(state),
                    random=entry(torch.get_rng_state()).sketch,
                    weights=weights,
                    state=optimizer,
                    at_line=self.session.here(),
                )
            )

    def let_training_go_on(self) -> None:
        """In a background thread: write only when the main thread has made its next step, so that a race shows."""
        if not self.watch or threading.current_thread() is threading.main_thread():
            return
        step, until = self.session.step_number(), time.monotonic() + _RACE_SECONDS
        while self.session.step_number() == step and time.monotonic() < until:
            time.sleep(0.002)


def install(session: Session) -> None:
    """Subscribe to saves, loads and the setters of state dicts."""
    checkpoints = Checkpoints(session, session.one(Flight))
    for target, operation in _OPERATIONS.items():
        session.dispatcher.around(target, before=checkpoints.watched(operation))

    def expanded(call: Call) -> None:
        checkpoints.saving(call.result)

    session.dispatcher.around(SAVED_DICT, after=expanded)
    if checkpoints.watch:
        crash.install(session, checkpoints.let_training_go_on)


def _target(operation: str, call: Call) -> str:
    """Where a save goes to or a load comes from, as an absolute path; "" if it is no file."""
    if operation == "torch.save":
        return place_of(call.given(1, "f"))
    if operation == "torch.load":
        return place_of(call.given(0, "f"))
    if operation not in ("save", "async_save", "load"):
        return ""
    storage = call.kwargs.get("storage_writer") or call.kwargs.get("storage_reader")
    return place_of(call.kwargs.get("checkpoint_id") or storage)


def _by_pickle(call: Call) -> bool:
    """Whether `torch.save` or `torch.load` is only the way in which Python writes a storage, as in `all_gather_object` of a tensor."""
    if call.args and isinstance(call.args[0], torch.UntypedStorage | torch.TypedStorage):
        return True
    return caller().f_code.co_name == "_load_from_bytes"


def _smaller(group: Any) -> bool:
    """Whether a group leaves out ranks."""
    return group is not None and dist.is_initialized() and dist.get_world_size(group) < dist.get_world_size()
