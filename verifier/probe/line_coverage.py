"""Which lines of the project a rank reaches, and which sides of conditional expressions.

Imports no torch: it watches the script from its first line.

From Python 3.12 on `sys.monitoring` reports each line, and each instruction of a function that has
such expressions, once and costs nothing afterwards; before, a trace function follows the frames of
the project's own files, each code object until all its lines are known, and the instructions of
lines with a side that is not. A trace function prolongs the life of local variables a little, so it
is used in the survey run alone. In other runs it follows the frames of single lines that are asked
for.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

from ..source.expression_sides import Span, choices, entries, span
from .frames import Frames, tree_of

Raised = Callable[[FrameType, BaseException, TracebackType], None]
# line events without a new line after which a frame is left alone: it computes, in a loop of its
# own
QUIET = 20_000
# instructions of one function that are followed between two steps
QUIET_INSTRUCTIONS = 50_000


class Sides:
    """Those of the project's conditional expressions that were evaluated, without one that is
    always.
    """

    def __init__(self) -> None:
        # {line: {offset: spans that begin there}} yet to come, by id of the code
        self._missing: dict[int, dict[int, dict[int, list[Span]]]] = {}
        self._spans: dict[str, list[tuple[Span, tuple[Span, ...]]]] = {}  # (first, sides) by file
        self._new: dict[str, set[Span]] = {}
        self._followed: dict[int, int] = {}  # instructions since the last report, by id of the code

    def again(self) -> None:
        """Report sides again that were reached before."""
        self._missing.clear()

    def new(self) -> dict[str, list[list[int]]]:
        """{file: spans} evaluated since the last call."""
        found, self._new = self._new, {}
        self._followed.clear()
        return {file: sorted(map(list, spans)) for file, spans in found.items()}

    def watch(self, code: CodeType, file: str, lines: set[int]) -> None:
        """Watch the sides that begin in these lines of a function."""
        here = [(first, sides) for first, sides in self._of(code.co_filename) if first[0] in lines]
        begun = entries(code, {one for first, sides in here for one in (first, *sides)})
        missing = self._missing[id(code)] = {}
        for one, offsets in begun.items():
            for offset, line in offsets.items():
                missing.setdefault(line, {}).setdefault(offset, []).append(one)
        # what the compiler has removed cannot be seen
        hidden = {one for first, sides in here if first in begun for one in sides} - {*begun}
        if hidden:
            self._new.setdefault(file, set()).update(hidden)

    def left(self, code: CodeType, line: int = 0) -> bool:
        """Whether a function, or one of its lines, has sides yet to come, and is followed."""
        missing = self._missing.get(id(code))
        if not missing or (line and line not in missing):
            return False
        return self._followed.get(id(code), 0) < QUIET_INSTRUCTIONS

    def passed(self, code: CodeType, offset: int, file: str) -> None:
        """An instruction is about to run."""
        self._followed[id(code)] = self._followed.get(id(code), 0) + 1
        missing = self._missing.get(id(code), {})
        for line, offsets in missing.items():
            if offset in offsets:
                self._new.setdefault(file, set()).update(offsets.pop(offset))
                if not offsets:
                    del missing[line]
                return

    def _of(self, file: str) -> list[tuple[Span, tuple[Span, ...]]]:
        if file not in self._spans:
            self._spans[file] = [
                (span(one.first), tuple(map(span, one.sides))) for one in choices(tree_of(file))
            ]
        return self._spans[file]


class Lines:
    """The lines of the project's files, or those of `asked`: what is new since it was last
    asked.
    """

    def __init__(self, frames: Frames, asked: Mapping[str, Sequence[int]] | None = None) -> None:
        self._frames = frames
        self._asked = (
            None
            if asked is None
            else {str(Path(file).resolve()): (file, set(asked[file])) for file in asked}
        )
        # asked for, by the name of the file in code objects
        self._files: dict[str, tuple[str, set[int]]] = {}
        # lines yet to come, by id of the code; None: not ours
        self._missing: dict[int, set[int] | None] = {}
        self._codes: list[CodeType] = []  # kept, so that no other gets the id of one
        self._new: dict[str, set[int]] = {}
        self.sides = Sides()
        self._tool: int | None = None  # that of sys.monitoring
        self._kept: set[CodeType] = set()  # whose frames are never left alone
        # before Python 3.12: what is called with each error that reaches a followed frame, and the
        # ids of the codes that are followed for their errors alone, as threads' first ones are
        self.raised: Raised = lambda frame, error, passed: None
        self.raising: set[int] = set()

    def start(self) -> None:
        """Watch from now on, in all threads."""
        if hasattr(sys, "monitoring"):
            self._monitor()
        else:
            threading.settrace(self._called)
            sys.settrace(self._called)

    def again(self) -> None:
        """Report lines again that were reached before: the training begins, and its frames are
        followed to the end.
        """
        self._missing.clear()
        self.sides.again()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            self._kept.add(frame.f_code)
            frame = frame.f_back
        if hasattr(sys, "monitoring"):
            sys.monitoring.restart_events()

    def new(self) -> dict[str, list[int]]:
        """{file: lines} reached since the last call."""
        found, self._new = self._new, {}
        return {file: sorted(lines) for file, lines in found.items()}

    def _lines_of(self, code: CodeType) -> set[int] | None:
        if (
            key := id(code)
        ) in self._missing:  # its hash would read all of it, at every call of any function
            return self._missing[key]
        if self._asked is None:
            lines = _lines(code) if self._frames.owns(code.co_filename) else None
        else:
            asked = self._wanted(code.co_filename)[1]
            lines = _lines(code) & asked if asked else None
        self._missing[key] = lines
        self._codes.append(code)
        if lines:
            self.sides.watch(code, self._name(code), lines)
            if self._tool is not None and self.sides.left(code):
                monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
                monitoring.set_local_events(self._tool, code, monitoring.events.INSTRUCTION)
        return lines

    def _name(self, code: CodeType) -> str:
        """The name by which the file of a function is reported."""
        return code.co_filename if self._asked is None else self._wanted(code.co_filename)[0]

    def _wanted(self, file: str) -> tuple[str, set[int]]:
        """The name by which a file was asked for, and its lines that were."""
        if file not in self._files:
            self._files[file] = (self._asked or {}).get(str(Path(file).resolve()), (file, set()))
        return self._files[file]

    def _add(self, code: CodeType, line: int) -> bool:
        """Whether this line is a new one."""
        missing = self._lines_of(code)
        if missing is None or line not in missing:
            return False
        missing.discard(line)
        self._new.setdefault(self._name(code), set()).add(line)
        return True

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        missing = self._lines_of(code)
        if missing is None:  # nearly every call: those of libraries
            return None
        if not missing and not self.sides.left(code):
            if id(code) not in self.raising and not self._frames.outermost_in_thread(frame):
                return None
            frame.f_trace_lines = False
        quiet = 0

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal quiet
            if event == "line":
                quiet = 0 if self._add(code, frame.f_lineno) else quiet + 1
                frame.f_trace_opcodes = self.sides.left(code, frame.f_lineno)
                if quiet > QUIET and code not in self._kept:
                    frame.f_trace_lines = frame.f_trace_opcodes = False
            elif event == "opcode":
                self.sides.passed(code, frame.f_lasti, self._name(code))
                frame.f_trace_opcodes = self.sides.left(code, frame.f_lineno)
            elif event == "exception":
                self.raised(frame, argument[1], argument[2])
            return line

        return line

    def _monitor(self) -> None:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
        tool = next((number for number in range(6) if monitoring.get_tool(number) is None), None)
        if tool is None:
            return
        self._tool = tool
        monitoring.use_tool_id(tool, "verified-fsdp2")

        def line(code: CodeType, number: int) -> Any:
            self._add(code, number)
            # the event of the first instruction of a line is lost where that of the line ends
            return None if self.sides.left(code, number) else monitoring.DISABLE

        def instruction(code: CodeType, offset: int) -> Any:
            self.sides.passed(code, offset, self._name(code))
            return monitoring.DISABLE

        monitoring.register_callback(tool, monitoring.events.LINE, line)
        monitoring.register_callback(tool, monitoring.events.INSTRUCTION, instruction)
        monitoring.set_events(tool, monitoring.events.LINE)


def _lines(code: CodeType) -> set[int]:
    """The lines of a function."""
    return {line for _, _, line in code.co_lines() if line}
