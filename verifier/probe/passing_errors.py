"""Errors that pass through the functions of the training, in the survey run.

An error that is caught is seen for the last time in the function that catches it, or in the
project's last one on its way to a library that does. So what is recorded last of an error, and no
step follows, says where the script swallowed it.

Imports no torch. From Python 3.12 on a tool of its own in `sys.monitoring` is called for RAISE;
before, the trace function of line_coverage.py is. Neither costs anything where no error is raised.
"""

from __future__ import annotations

import queue
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from types import CodeType, FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from ..trace.events import LoopAt, Passing
from ..trace.origin import origin
from .line_coverage import Lines
from .loop_progress import loops_at
from .stop_run import StopRun

if TYPE_CHECKING:
    from .session import Session

# by which Python ends loops and generators, and the verifier a run; and what a loop that polls a
# queue raises in each turn
_SIGNALS = (StopIteration, StopAsyncIteration, GeneratorExit, StopRun, queue.Empty)
MOST = 3  # records of one error at one line; of later ones only the last, where the script ends
_LONGEST = 2_000  # characters of a message
_FRAMES = 30
_Seen = tuple[str, CodeType, int]  # class, function, line


class PassingErrors:
    """Each error as far out as it was seen; `made` says how many steps have been made."""

    def __init__(self, session: Session, lines: Lines, made: Callable[[], int]) -> None:
        self.session, self.lines, self.made = session, lines, made
        self.open = False  # whether one was recorded since the last step
        self.sharded = False
        self.backwards = 0  # since the sharding
        self.since_step = 0
        # {id of a function that is on the stack of the first step: its line there}
        self._training: dict[int, int] = {}
        self._codes: list[CodeType] = []  # kept, so that no other gets the id of one
        # {(id, file, line): frames passed} of the errors of one number
        self._passed: dict[tuple[int, str, int], int] = {}
        self._number = 0
        self._met: Counter[_Seen] = Counter()
        self._again: Counter[_Seen] = Counter()  # since the last step
        self._held: Passing | None = None  # not written

    def start(self) -> None:
        """Watch from now on, in all threads."""
        self.lines.raised = self.passed
        if not hasattr(sys, "monitoring"):
            return
        monitoring: Any = sys.monitoring
        tool = next((number for number in range(6) if monitoring.get_tool(number) is None), None)
        if tool is None:
            return
        monitoring.use_tool_id(tool, "verified-fsdp2-errors")

        def raised(code: CodeType, offset: int, error: BaseException) -> None:
            if error.__traceback__ is not None:
                self.passed(sys._getframe(1), error, error.__traceback__)

        monitoring.register_callback(tool, monitoring.events.RAISE, raised)
        monitoring.set_events(tool, monitoring.events.RAISE)

    def begin(self) -> None:
        """The first step is about to be made: from now on only errors count that reach the
        functions that make it.
        """
        for frame in self.session.frames.own():
            self._training[id(frame.f_code)] = frame.f_lineno
            self._codes.append(frame.f_code)
        self.lines.raising |= set(self._training)
        self._passed.clear()

    def sharding(self) -> None:
        """`fully_shard` is called for the first time."""
        self.sharded, self.backwards = True, 0

    def stepped(self) -> None:
        """A step has been made: the training goes on."""
        self.open, self._held, self.since_step = False, None, 0
        self._again.clear()

    def backward(self) -> None:
        """A backward is about to begin."""
        self.backwards += 1
        self.since_step += 1

    def end(self) -> None:
        """The script has ended."""
        if self._held is not None:
            self.session.write(self._held)
            self._held = None

    def passed(self, frame: FrameType, error: BaseException, raised: TracebackType) -> None:
        """An error has reached a frame of the project. Never raises."""
        if isinstance(error, _SIGNALS):
            return
        # what becomes of an error that leaves a thread is for the script to ask
        if not self._watches(frame.f_code) and not self._leaves_a_thread(frame):
            return
        try:
            self._note(frame, error, raised)
        except Exception as own:
            self.session.report("passing_errors", own)

    def _watches(self, code: CodeType) -> bool:
        if self._training:
            return id(code) in self._training
        return self.session.frames.owns(code.co_filename)

    def _leaves_a_thread(self, frame: FrameType) -> bool:
        """Whether a frame is the outermost of a thread that does not train."""
        trains = id(frame.f_code) in self._training
        return not trains and self.session.frames.outermost_in_thread(frame)

    def _owns(self, frame: FrameType) -> bool:
        return self.session.frames.owns(frame.f_code.co_filename)

    def _note(self, frame: FrameType, error: BaseException, raised: TracebackType) -> None:
        seen = (type(error).__name__, frame.f_code, raised.tb_lineno)
        self._met[seen] += 1
        self._again[seen] += 1
        event = self._event(frame, error, raised, self._again[seen])
        if self._met[seen] > MOST:
            self._held = event
            return
        self.session.write(event)
        self.open, self._held = True, None

    def _event(
        self, frame: FrameType, error: BaseException, raised: TracebackType, again: int
    ) -> Passing:
        frames = self.session.frames.along(raised)
        if len(frames) > 2 * _FRAMES:
            frames = frames[:_FRAMES] + frames[-_FRAMES:]
        return Passing(
            number=self._numbered(error, raised),
            error=type(error).__name__,
            message=_message(error),
            classes=[kind.__name__ for kind in type(error).__mro__],
            origin=_defined_by(type(error)),
            frames=frames,
            loops=self._loops(traceback.walk_tb(raised)),
            callers=self._loops([*traceback.walk_stack(frame.f_back)][::-1]),
            before_step=self._before_step(raised),
            steps=self.made(),
            backwards=self.backwards,
            since_step=self.since_step,
            training=bool(self._training),
            sharded=self.sharded,
            thread=self._leaves_a_thread(frame),
            again=again,
        )

    def _numbered(self, error: BaseException, raised: TracebackType) -> int:
        """The number of an error that was met before, or was raised while one was handled that
        was.
        """
        frames = list(traceback.walk_tb(raised))
        inner, line = frames[-1]
        key = (id(error), inner.f_code.co_filename, line)
        # an error on its way out passes more and more frames; else another one has got its id
        if self._passed.get(key, len(frames)) >= len(frames):
            known, before = {one[0] for one in self._passed}, error.__context__
            while before is not None and id(before) not in known:
                before = before.__context__
            if before is None:
                self._number += 1
                self._passed.clear()
        self._passed[key] = len(frames)
        return self._number

    def _loops(self, frames: Iterable[tuple[FrameType, int]]) -> list[LoopAt]:
        """The loops around lines of functions of the training (of the project, before the first
        step and in a thread), in the order of the frames.
        """
        in_thread = threading.current_thread() is not threading.main_thread()
        return [
            loop
            for frame, line in frames
            if self._watches(frame.f_code) or (in_thread and self._owns(frame))
            for loop in loops_at(frame, line)
        ]

    def _before_step(self, raised: TracebackType) -> bool:
        """Whether the error was raised on the way to the step of its iteration."""
        for frame, line in traceback.walk_tb(raised):
            step = self._training.get(id(frame.f_code))
            if step is not None and step != line:
                return line < step
        return True


def _message(error: BaseException) -> str:
    try:
        return str(error)[:_LONGEST]
    except Exception as failed:
        return f"(no message: its `__str__` raised {type(failed).__name__})"


def _defined_by(kind: type) -> str:
    """Whose code defines a class."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return origin(file) if file else "python"
