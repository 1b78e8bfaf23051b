"""Which lines of the project a rank reaches.

Imports no torch: it watches the script from its first line.

From Python 3.12 on `sys.monitoring` reports each line once and costs nothing afterwards; before, a
trace function follows the frames of the project's own files, each code object until all its lines
are known. A trace function prolongs the life of local variables a little, so it is used in the
survey run alone. In the train run it follows the frames of single lines that are asked for.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

from .frames import Frames

Raised = Callable[[FrameType, BaseException, TracebackType], None]
# line events without a new line after which a frame is left alone: it computes, in a loop of its
# own
QUIET = 20_000


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
        self._kept: set[CodeType] = set()  # whose frames are never left alone
        # before Python 3.12: what is called with each error that reaches a followed frame, and the
        # ids of the codes that are followed for their errors alone
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
        own = self._asked is not None or self._frames.owns(code.co_filename)
        lines = {line for _, _, line in code.co_lines() if line} if own else None
        if lines and self._asked is not None:
            lines &= self._wanted(code.co_filename)[1]
        self._missing[key] = lines
        self._codes.append(code)
        return lines

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
        file = code.co_filename if self._asked is None else self._wanted(code.co_filename)[0]
        self._new.setdefault(file, set()).add(line)
        return True

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not self._lines_of(frame.f_code):
            if id(frame.f_code) not in self.raising:
                return None
            frame.f_trace_lines = False
        quiet = 0

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal quiet
            if event == "line":
                quiet = 0 if self._add(frame.f_code, frame.f_lineno) else quiet + 1
                if quiet > QUIET and frame.f_code not in self._kept:
                    frame.f_trace_lines = False
            elif event == "exception":
                self.raised(frame, argument[1], argument[2])
            return line

        return line

    def _monitor(self) -> None:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
        tool = next((number for number in range(6) if monitoring.get_tool(number) is None), None)
        if tool is None:
            return
        monitoring.use_tool_id(tool, "verified-fsdp2")

        def line(code: CodeType, number: int) -> Any:
            self._add(code, number)
            return monitoring.DISABLE

        monitoring.register_callback(tool, monitoring.events.LINE, line)
        monitoring.set_events(tool, monitoring.events.LINE)
