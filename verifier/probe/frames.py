"""The user's lines on the stack, without those of torch, Python and the verifier."""

import ast
import linecache
import os
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from ..trace.events import Line, Place
from ..trace.origin import is_machinery, is_user

_PROBE = str(Path(__file__).resolve().parent) + os.sep

MOST = 3  # files between a library's line and the user's, and of callers, that a place names
_Frame = tuple[str, int, str]  # file, line, function


class Frames:
    """Finds the lines of a project below the folder `project`."""

    def __init__(self, project: str) -> None:
        self.project = project
        self._inside = project + os.sep

    def owns(self, file: str) -> bool:
        """Whether a file is part of the project."""
        return file.startswith(self._inside) and is_user(file)

    def here(self) -> Place | None:
        """The running line of the user's code: the innermost frame in the project, else outside
        torch, Python and the verifier.

        With the line of the library that it led to, if other frames outside torch, Python and the
        verifier are further inside, and with the lines of other files of the project that led
        there.
        """
        inside: list[_Frame] = []
        own: list[_Frame] = []
        for line in running():
            if self.owns(line[0]):
                own.append(line)
            elif not own and not is_machinery(line[0]):
                inside.append(line)
        if own:
            return _place(own[0], inside, own[1:])
        return _place(inside[0]) if inside else None

    def defined(self, function: object) -> Line | None:
        """The first line of a function of the project; None for another."""
        code = getattr(function, "__code__", None)
        own = code is not None and self.owns(code.co_filename)
        return (
            line_at(code.co_filename, code.co_firstlineno, code.co_name)
            if code is not None and own
            else None
        )

    def own(self) -> Iterator[FrameType]:
        """The frames of the project on the stack, innermost first."""
        return (
            frame
            for frame, _ in traceback.walk_stack(sys._getframe(1))
            if self.owns(frame.f_code.co_filename)
        )

    def outermost_in_thread(self, frame: FrameType) -> bool:
        """Whether a frame is the project's outermost one, in a thread that is not the main one."""
        if threading.current_thread() is threading.main_thread():
            return False
        around = (one for one, _ in traceback.walk_stack(frame.f_back))
        return self.owns(frame.f_code.co_filename) and not any(
            self.owns(one.f_code.co_filename) for one in around
        )

    def lines(self) -> tuple[tuple[str, int], ...]:
        """(file, line) of the frames of the project on the stack, innermost first."""
        return tuple((file, line) for file, line, _ in running() if self.owns(file))

    def stack(self, error: BaseException | None = None) -> list[Place]:
        """The frames of the user's code, innermost first, of the running code or where `error` was
        raised.

        The frames inside the project; if there are none, those outside torch, Python and the
        verifier.
        """
        return self.along(error.__traceback__) if error is not None else self._theirs([*running()])

    def along(self, raised: TracebackType | None) -> list[Place]:
        """The same frames of a traceback."""
        return self._theirs([*_lines(traceback.walk_tb(raised))][::-1])

    def _theirs(self, lines: list[_Frame]) -> list[Place]:
        theirs = [line for line in lines if not is_machinery(line[0])]
        own = [line for line in theirs if self.owns(line[0])]
        inside = theirs[: theirs.index(own[0])] if own else []
        return [_place(line, () if at else inside) for at, line in enumerate(own or theirs)]


def caller() -> FrameType:
    """The innermost frame outside the probe."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_PROBE) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def place_at(frame: FrameType, line: int, callers: Iterable[FrameType] = ()) -> Place:
    """A line of the function that a frame runs, with those at which its callers are."""
    code = frame.f_code
    outside = ((one.f_code.co_filename, one.f_lineno, one.f_code.co_name) for one in callers)
    return _place((code.co_filename, line, code.co_name), outside=outside)


def line_at(file: str, line: int, function: str) -> Line:
    """A line with its code."""
    return Line(**_line((file, line, function)))


@lru_cache(maxsize=16)
def tree_of(file: str) -> tuple[ast.AST, ...]:
    """Every node of a file's syntax; () if it has none."""
    # In the user's process, which holds nothing of what the verifier has read.
    try:
        return tuple(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except SyntaxError:
        return ()


def running() -> Iterator[_Frame]:
    """The lines on the stack, innermost first."""
    return _lines(traceback.walk_stack(sys._getframe(1)))


def _lines(frames: Iterable[tuple[FrameType, int]]) -> Iterator[_Frame]:
    return ((frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in frames)


def _place(frame: _Frame, inside: Iterable[_Frame] = (), outside: Iterable[_Frame] = ()) -> Place:
    """A place, with the lines further inside, the innermost first, and those that led there: one of
    each file.
    """
    lines = _one_of_each(inside, frame[0])[: 1 + MOST]
    callers = _one_of_each(outside, frame[0])[:MOST]
    return Place(
        **_line(frame), library=lines[0] if lines else None, through=lines[1:], callers=callers
    )


def _one_of_each(lines: Iterable[_Frame], besides: str) -> list[Line]:
    files: dict[str, _Frame] = {}
    for line in lines:
        files.setdefault(line[0], line)
    return [Line(**_line(line)) for file, line in files.items() if file != besides]


def _line(frame: _Frame) -> dict[str, Any]:
    file, number, function = frame
    return {
        "file": file,
        "line": number,
        "function": function,
        "code": linecache.getline(file, number).strip(),
    }
