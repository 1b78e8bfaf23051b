"""One rank's life: environment, hooks, the script, and an honest record of how it ended."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import random
import runpy
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import torch

from . import hooks, hooks_raised, opener
from .recorder import Recorder
from .session import Session, StopRun, trace_path

STACKS_SIGNAL = signal.SIGRTMAX - 1


def run(request: dict[str, Any], rank: int) -> int:
    """Run the script of `request` as rank `rank`; returns the exit code. Never returns to code of the launcher."""
    folder = Path(request["folder"])
    _redirect(folder / f"rank{rank}.out", folder / f"rank{rank}.err")
    stacks = (folder / f"rank{rank}.stacks").open("w")
    faulthandler.enable(stacks, all_threads=True)
    faulthandler.register(STACKS_SIGNAL, stacks, all_threads=True)
    script = Path(request["script"])
    recorder = Recorder(trace_path(folder, rank), str(script.parent))
    recorder.write("start", rank=rank, world_size=request["world_size"], torch=torch.__version__)
    if request["open"]:
        return opener.open_all(request["open"], recorder)
    _seed_as_a_new_process()
    hooks.install(Session(request, rank, recorder))
    os.chdir(request["cwd"])
    sys.path[0] = str(script.parent)
    sys.argv = [str(script), *request["argv"]]
    code = _run_script(script, recorder)
    return _wind_down(code, recorder)


def _run_script(script: Path, recorder: Recorder) -> int:
    try:
        runpy.run_path(str(script), run_name="__main__")
    except StopRun:
        return 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else (0 if error.code is None else 1)
        message = error.code if isinstance(error.code, str) else ""
        recorder.write("end", how="sys.exit", code=code, message=message, frames=recorder.stack(error))
        return code
    except BaseException as error:
        name = type(error).__name__
        hooks_raised.note(recorder, error)
        recorder.write("end", how="exception", error=name, message=str(error), frames=recorder.stack(error))
        traceback.print_exception(error)
        return 1
    else:
        recorder.write("end", how="return", code=0)
        return 0
    finally:
        recorder.sync()


def _wind_down(code: int, recorder: Recorder) -> int:
    """What an interpreter does at its end, up to finalisation, which some right gloo runs do not survive."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException as error:
        recorder.write("end", how="exception", error=type(error).__name__, message=str(error), frames=[])
        code = code or 1
    recorder.write("down", code=code)
    recorder.sync()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code


def _seed_as_a_new_process() -> None:
    """A forked rank must not share the launcher's random state: a real rank starts from fresh entropy."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def _redirect(out: Path, err: Path) -> None:
    for path, stream in ((out, 1), (err, 2)):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(handle, stream)
        os.close(handle)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
