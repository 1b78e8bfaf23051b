"""Checkpoint functions that the script calls: which, with which path, and what a save is given."""

import functools
import os
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from ...trace.events import Checkpoint, Saving, SetState
from .. import crash, outputs, renamed_paths
from ..compat.names import SAVED_DICT
from ..dispatcher import Call, Leave
from ..frames import caller
from ..save_contents import entries, entry, held, place_of
from ..session import Session
from .collective_log import Flight

# A background save waits for the next training step, so that a race with it shows in every run
# (fault async-save-state-race).
_RACE_SECONDS = 0.3
DCP = "torch.distributed.checkpoint"
_SETTERS = ("set_model_state_dict", "set_optimizer_state_dict", "set_state_dict")
_OPERATIONS = {
    **{f"{DCP}:{name}": name for name in ("save", "async_save", "load")},
    **{f"{DCP}.state_dict:{name}": name for name in _SETTERS},
    **{f"torch:{name}": f"torch.{name}" for name in ("save", "load")},
}


class Checkpoints:
    """The checkpoints of one rank.

    A call inside a checkpoint function of torch is not the script's own.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.flight = session.one(Flight)
        self.targets = session.one(renamed_paths.Moved).targets  # paths of saves
        self.inside = threading.local()  # operation: the script's call that this thread is in
        self.calls = 0
        self.watch: bool = session.request.watch_saves
        self.home: str = session.request.checkpoint + os.sep

    def before(self, call: Call, operation: str) -> Leave | None:
        """An operation is about to begin."""
        around = getattr(self.inside, "operation", None)
        if around is not None or _by_pickle(call):
            # in the `load_state_dict` of a Stateful of the script
            if around is not None and around[0] == "load":
                self._set_state(operation, call)
            return None
        if (place := self.session.here()) is None:
            return None
        self.session.publish("checkpoint")
        target = path_of(operation, call)
        if operation == "torch.save":
            outputs.about_to_write(target)
            crash.in_change(self.session, crash.FILE)
        self.session.write(
            Checkpoint(
                op=operation, after_step=self.session.progress.made(), to=target, at_line=place
            )
        )
        self._set_state(operation, call)
        self.inside.operation = (operation, target, call.kwargs)
        if operation == "torch.save" and target:
            self._file(call.given(0, "obj"), target)

        def leave() -> None:
            self.inside.operation = None
            if operation == "async_save" and call.failed is None:
                self.flight.started(call.result, call.kwargs.get("process_group"))

        return leave

    def _set_state(self, operation: str, call: Call) -> None:
        """Record what this rank passes to a setter before it runs: a call on one rank alone
        hangs.
        """
        model_first = operation == "set_model_state_dict"
        given = (
            call.given(1, "model_state_dict")
            if model_first
            else call.kwargs.get("model_state_dict")
        )
        if (model_first or operation == "set_state_dict") and isinstance(given, dict):
            broadcast = bool(getattr(call.kwargs.get("options"), "broadcast_from_rank0", False))
            here = self.session.here()
            self.session.write(
                SetState(op=operation, given=len(given), broadcast=broadcast, at_line=here)
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
        self.targets.add(target)
        crash.arm(self.session, self.calls, target)
        with torch.no_grad():
            weights, optimizer = held(self.session)
            self.session.write(
                Saving(
                    op=name,
                    call=self.calls,
                    after_step=self.session.progress.made(),
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
        """In a background thread: wait with the write for the main thread's next step, so that a
        race shows.
        """
        if not self.watch or threading.current_thread() is threading.main_thread():
            return
        step, until = self.session.progress.step_number(), time.monotonic() + _RACE_SECONDS
        while self.session.progress.step_number() == step and time.monotonic() < until:
            time.sleep(0.002)

    def opened(self, given: tuple[Any, ...]) -> None:
        """A file below `{checkpoint}` that the script reads or writes in a format of its own.

        Logs are appended to.
        """
        if not isinstance(given[0], str) or not given[0].startswith(self.home):
            return
        if getattr(self.inside, "operation", None) is not None:
            return
        mode, place = given[1] or "", self.session.here()
        # Logs are appended to; checkpoints are written anew.
        if place is not None and "a" not in mode:
            self.inside.operation = ("open", given[0], {})
            try:
                op = "write" if {*mode} & {*"wx+"} else "read"
                if op == "write" and threading.current_thread() is threading.main_thread():
                    self.session.publish("checkpoint")
                if op == "write":
                    crash.in_change(self.session, crash.FILE)
                made, path = self.session.progress.made(), os.path.normpath(given[0])
                self.session.write(Checkpoint(op=op, after_step=made, to=path, at_line=place))
            finally:
                self.inside.operation = None


def install(session: Session) -> None:
    checkpoints = Checkpoints(session)
    if session.request.checkpoint:
        opened = session.guarded(checkpoints.opened)
        sys.addaudithook(lambda event, given: opened(given) if event == "open" else None)
    for target, operation in _OPERATIONS.items():
        session.around(target, before=functools.partial(checkpoints.before, operation=operation))
    session.around(SAVED_DICT, after=lambda call: checkpoints.saving(call.result))
    if checkpoints.watch:
        crash.install(session, checkpoints.let_training_go_on)
        renamed_paths.install(session)


def path_of(operation: str, call: Call) -> str:
    """The absolute path of a save or load; "" if it is not a file."""
    if operation.startswith("torch."):
        return place_of(call.given(1 if operation == "torch.save" else 0, "f"))
    storage = call.kwargs.get("storage_writer") or call.kwargs.get("storage_reader")
    return "" if operation in _SETTERS else place_of(call.kwargs.get("checkpoint_id") or storage)


def _by_pickle(call: Call) -> bool:
    """Whether Python's object serialiser calls `torch.save` or `torch.load` for a storage, as in
    `all_gather_object` of a tensor.
    """
    if call.args and isinstance(call.args[0], torch.UntypedStorage | torch.TypedStorage):
        return True
    return caller().f_code.co_name == "_load_from_bytes"


def _smaller(group: Any) -> bool:
    """Whether a group leaves out ranks."""
    return (
        group is not None
        and dist.is_initialized()
        and dist.get_world_size(group) < dist.get_world_size()
    )
