"""The state of one rank during a run that topics share, and the notices that they publish to each
other.

A *root* is a module that the script calls itself (not from within another module) and that has
parameters. A *step* is one `optimizer.step()`; a *micro-batch* one backward. Nothing here judges.

| notice | arguments | given when |
|---|---|---|
| call | module, tensors() | a module is called while no other is running |
| adopt | root, name | a root is called for the first time, and is recorded |
| shard | modules, options | `fully_shard` is about to be applied |
| before backward | | a backward is about to begin |
| backward | tensors | a backward has ended |
| beyond | parameters | a backward has ended after the last requested step |
| stepping | optimizer, closure | an optimizer is about to step |
| closed | | the closure of a step has ended |
| stepped | optimizer | an optimizer has stepped |
| stop | | the run is about to be stopped |
| failed | | the script has raised an error |
| ended | | the script has ended, in whichever way |
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import nn

from ..launch.request import Request
from ..trace.events import Criterion, End, Event, Place
from ..trace.writer import Writer
from .compat.groups import Slot, slots
from .compat.tensors import own_tensors
from .dispatcher import Dispatcher, name_of
from .frames import Frames
from .line_coverage import Lines
from .optimizer_ids import Turns
from .probe_errors import ProbeErrors
from .stop_run import StopRun

_One = TypeVar("_One")
TRAINING = (
    "call",
    "before backward",
    "backward",
    "stepping",
    "closed",
    "stepped",
)  # notices of a step


@dataclass
class StepProgress:
    """Where the training is: its steps, the micro-batches of the next one, what is running."""

    optimizers: Turns
    thread: int = field(default_factory=threading.get_ident)  # that trains
    depth: int = 0  # of the calls of modules that are running, in that thread
    in_backward: bool = False
    in_step: bool = False
    micro: int = 0  # micro-batches that have ended since the last step
    # in the survey run: backwards of a script that no optimizer of torch has stepped in yet
    own: int = 0
    # whether weights have changed since the last step that is recorded
    pending: Callable[[], bool] = lambda: False

    @property
    def elsewhere(self) -> bool:
        """Whether this is another thread that the script has started, such as a reader: what it
        draws and calls is no part of a step. Those of autograd are.
        """
        if threading.get_ident() == self.thread:
            return False
        return type(threading.current_thread()).__name__ != "_DummyThread"  # not Python's own

    def step_number(self) -> int:
        """The step that is being prepared or made (its closure may run backward), from 1."""
        return self.optimizers.begun + (not self.in_step)

    def made(self) -> int:
        """How many steps are behind what the script holds now, as it is about to save."""
        return max(self.step_number() - 1, self.own) + self.pending()


@dataclass
class MicroBatch:
    """What is seen of a micro-batch until its backward ends."""

    rows: list[int] = field(default_factory=list)
    # of forwards in eval mode: those of a script that trains in it
    rows_in_eval: list[int] = field(default_factory=list)
    tokens: int = 0
    # of each tensor of the samples: elements, their sum, that of their absolute values
    parts: list[list[float]] = field(default_factory=list)
    criteria: list[Criterion] = field(default_factory=list)
    random_state: str | None = None  # at its first forward


@dataclass
class Gradients:
    """Sketches of the gradients, by parameter."""

    last: dict[str, list[float] | None] = field(default_factory=dict)  # after the last backward
    # at the first clip since; empty if there was none
    before_clip: dict[str, list[float] | None] = field(default_factory=dict)


class Session:
    """State of one rank in one run: what was requested, where the training is, what is recorded
    next, the models, and the services that topics use.
    """

    def __init__(
        self,
        request: Request,
        rank: int,
        writer: Writer,
        frames: Frames,
        lines: Lines | None = None,
    ) -> None:
        self.request = request
        self.rank = rank
        self.writer = writer
        self.frames = frames
        self.lines = lines  # those that are watched, in the survey run
        self.report = ProbeErrors(writer).report
        self.dispatcher = Dispatcher(self.report)
        self.around = self.dispatcher.around
        self.progress = StepProgress(Turns(request.in_phases))
        self.batch = MicroBatch()
        self.gradients = Gradients()
        self.roots: list[tuple[str, nn.Module]] = []
        self.tops: list[weakref.ref[nn.Module]] = []  # the outermost sharded modules
        self.dormant = request.skip_steps > 0
        self._waiting = request.from_sharding_on
        self._subscribers: dict[str, list[Callable[..., None]]] = {}
        self._stopped = False
        self._shared: dict[Any, Any] = {}
        self._counted: Counter[Any] = Counter()

    def one(self, make: Callable[[Session], _One]) -> _One:
        """The object of a kind that the topics of this rank share, such as `one(Models)`."""
        if make not in self._shared:
            self._shared[make] = make(self)
        return self._shared[make]  # type: ignore[no-any-return]

    def first(self, key: Any, most: int = 1) -> bool:
        """Whether this is one of the first `most` calls with `key`, for events that are recorded
        only so often.
        """
        self._counted[key] += 1
        return self._counted[key] <= most

    def write(self, event: Event) -> None:
        """Record an event of this rank."""
        self.writer.write(event)

    def here(self) -> Place | None:
        """The line of the user's code that is running."""
        return self.frames.here()

    def subscribe(self, notice: str, subscriber: Callable[..., None], first: bool = False) -> None:
        """Let `subscriber` be called at each notice of this name, after those before it (or before
        them all).
        """
        known = self._subscribers.setdefault(notice, [])
        known.insert(0 if first else len(known), subscriber)

    def publish(self, notice: str, *arguments: Any) -> None:
        """Call the subscribers of a notice.

        An error of one is recorded and stops neither the others nor the script.
        """
        if self.dormant and notice in TRAINING:
            return
        if self._waiting and notice in TRAINING:
            if notice != "call" or not self._holds_shards(arguments[0]):
                return
            self._waiting = False
        with own_tensors():
            for subscriber in self._subscribers.get(notice, ()):
                try:
                    subscriber(*arguments)
                except Exception as error:
                    self.report(name_of(subscriber), error)

    def _holds_shards(self, module: nn.Module) -> bool:
        """Whether a module is sharded, or a part of it."""
        tops = {id(top()) for top in self.tops}
        return any(id(part) in tops for part in module.modules())

    def guarded(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """A hook for torch to call. Its error is recorded and does not reach the script."""

        @functools.wraps(hook)
        def called(*args: Any, **kwargs: Any) -> Any:
            try:
                with own_tensors():
                    return hook(*args, **kwargs)
            except Exception as error:
                self.report(name_of(hook), error)
                return None

        return called

    def all_slots(self) -> list[Slot]:
        """Every parameter of every root, under its full name."""
        return [
            Slot(name + s.name, s.param, s.fsdp) for name, root in self.roots for s in slots(root)
        ]

    def stop(self) -> None:
        """End the run, which has made all its steps. Raises StopRun."""
        if not self._stopped:
            self._stopped = True
            self.publish("stop")
            self.write(End(how="stopped"))
        raise StopRun
