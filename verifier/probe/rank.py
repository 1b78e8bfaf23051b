"""Runs one rank: environment, probe, the script, and a record of how it ended.

Imports torch only when needed.
"""

import atexit
import contextlib
import faulthandler
import os
import random
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import PROBE_FAILED
from ..isolation.inside import in_world
from ..launch import processes
from ..trace.events import End, Start, Visited
from ..trace.writer import Writer
from . import children, outputs
from .frames import Frames
from .imports import after_import
from .line_coverage import Lines
from .probe_errors import ProbeErrors
from .stop_run import StopRun

# Seconds for the threads of a stopped script (savers, loaders) to end: killed in a write they left
# half a file.
THREADS = 10.0  # seconds that the threads of a stopped script have to end their work
_WAITING = {
    "wait",
    "get",
    "join",
    "_wait_for_tstate_lock",
    "_worker",
}  # functions in which a thread has nothing to do
LONGEST = 100_000  # characters of an error's message


def run(request: dict[str, Any], rank: int) -> int:
    """Run the script of `request` as rank `rank`; returns the exit code.

    Never returns to code of the launcher.
    """
    null = os.open(os.devnull, os.O_RDONLY)  # no input
    os.dup2(null, 0)
    os.close(null)
    stacks = Path(request["folder"], f"rank{rank}.stacks").open("w")  # noqa: SIM115 (open as long as the process is there)
    faulthandler.enable(stacks, all_threads=True)
    faulthandler.register(processes.STACKS_SIGNAL, stacks, all_threads=True)
    probe = _Probe(request, rank)
    if request["open"]:
        import torch  # noqa: F401

        from . import checkpoint_reader

        return checkpoint_reader.open_all(request["open"], probe.writer)
    outputs.install()
    children.hand_on(request)
    atexit.register(lambda: children.end() if probe.stopped else None)
    if "torch" in sys.modules:
        _seed_as_a_new_process()
        probe.start()
    else:
        after_import("torch", lambda module: probe.start())
    os.chdir(request["cwd"])
    in_world(request["world"])
    sys.path[0] = request["cwd"] if request["module"] else str(Path(request["script"]).parent)
    sys.argv = [request["script"], *request["argv"]]
    code = _run_script(request, probe)
    return _wind_down(code, probe.writer, probe.stopped)


class _Probe:
    """The writer of the trace, and the session, which starts with torch."""

    def __init__(self, request: dict[str, Any], rank: int) -> None:
        self._request = request
        self._rank = rank
        self.stopped = False  # after its last step
        self.publish: Callable[[str], None] = lambda notice: None  # before torch is imported
        self.writer = Writer(Path(request["folder"], f"rank{rank}.jsonl"), request["secret"])
        self.frames = Frames(request["project"] or str(Path(request["script"]).parent))
        self.lines = Lines(self.frames) if request["mode"] == "survey" else None
        self.asked = Lines(self.frames, request["lines"]) if request["lines"] else None

    def start(self) -> None:
        """Record from now on.

        An error of the probe ends this rank here: during `import torch` it would look like the
        script's.
        """
        import torch

        try:
            from ..launch.request import Request
            from .install import install
            from .session import Session

            self.writer.write(Start(torch=torch.__version__))
            session = Session(
                Request.of(self._request), self._rank, self.writer, self.frames, self.lines
            )
            install(session)
            self.publish = session.publish
        except Exception as error:
            ProbeErrors(self.writer).report("start", error)
            traceback.print_exc()
            sys.stderr.flush()
            processes.leave(PROBE_FAILED)


def _run_script(request: dict[str, Any], probe: _Probe) -> int:
    for lines in (probe.lines, probe.asked):
        if lines is not None:
            lines.start()
    try:
        if request["module"]:
            runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(request["script"], run_name="__main__")
    except StopRun:
        probe.stopped = True
        return 0
    except SystemExit as error:
        # a launcher such as Hydra's reported this error
        if error.code == 1 and isinstance(error.__context__, Exception):
            return _failed(probe, error.__context__)
        code = error.code if isinstance(error.code, int) else (0 if error.code is None else 1)
        message = error.code if isinstance(error.code, str) else ""
        frames = probe.frames.stack(error)
        probe.writer.write(End(how="sys.exit", code=code, message=message, frames=frames))
        return code
    except BaseException as error:
        return _failed(probe, error)
    else:
        probe.writer.write(End(how="return"))
        return 0
    finally:
        if probe.asked is not None:
            reached = probe.asked.new()
            seen = {file: reached.get(file, []) for file in request["lines"]}
            probe.writer.write(Visited(lines=seen, sides=probe.asked.sides.new()))
        probe.publish("ended")


def _failed(probe: _Probe, error: BaseException) -> int:
    """Record the error that ended the script."""
    probe.publish("failed")
    if "torch" in sys.modules:
        from .events import raised

        raised.note(probe.writer, probe.frames, error)
    name = type(error).__name__
    probe.writer.write(
        End(how="exception", error=name, message=_message(error), frames=probe.frames.stack(error))
    )
    traceback.print_exception(error)
    return 1


def _message(error: BaseException) -> str:
    try:
        return str(error)[:LONGEST]
    except Exception as failed:
        return f"(no message: its `__str__` raised {type(failed).__name__})"


def _let_threads_end() -> None:
    """Wait for the threads of a script that was stopped, which it can no longer join, until each
    has ended or waits for more work.
    """
    until, idle = time.monotonic() + THREADS, 0
    while (
        left := [
            t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon
        ]
    ) and idle < 5:
        frames = sys._current_frames()
        at = [
            frame.f_code.co_name
            for thread in left
            if (frame := frames.get(thread.ident or 0)) is not None
        ]
        idle = idle + 1 if _WAITING.issuperset(at) else 0
        if time.monotonic() > until:
            break
        time.sleep(0.05)


def _wind_down(code: int, writer: Writer, stopped: bool) -> int:
    """What an interpreter does at exit, up to finalisation, in which some correct gloo runs
    abort.
    """
    try:
        if stopped:
            _let_threads_end()
        else:
            threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException as error:
        writer.write(End(how="exception", error=type(error).__name__, message=_message(error)))
        code = code or 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code


def _seed_as_a_new_process() -> None:
    """Give a forked rank the random state of a new process, as torchrun's workers have it: fresh
    entropy on every rank.

    The fork copies only torch's default CPU generator: those of devices are seeded with fresh
    entropy when the rank initialises the device, and `torch.seed()` would give them all one seed. A
    new `torch.Generator()` starts from a constant.

    The salt of string hashes is fixed when an interpreter starts: torchrun's ranks have one each
    (unless PYTHONHASHSEED is set), forked ranks share the launcher's. Only `--launcher torchrun`
    shows ranks that differ in the order of a set of strings, or in a seed made by `hash`.
    """
    import torch

    random.seed()
    torch.default_generator.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
