"""What a project makes once, before its runs, such as the tokens that they map into memory: in a
world that all runs find.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ..errors import MachineRefuses, UserError
from ..isolation.refusal import refusal
from ..isolation.worlds import Worlds
from . import command
from .client import Launcher
from .request import Request

FOLDER = "prepared"  # below that of the verification


def prepare(launcher: Launcher, files: Worlds, words: Sequence[str], timeout: float) -> None:
    """Run the command in the working folder of `files`, to its end and with all that it starts.

    Raises UserError with its output if it fails or takes longer than `timeout` seconds,
    MachineRefuses if it may not write.
    """
    folder = files.work / FOLDER
    folder.mkdir(parents=True)
    world = files.begin(folder, "scratch")
    request = Request(
        folder=str(folder),
        script="",
        cwd=world.inside(str(files.cwd)),
        world_size=1,
        command=[words[0], *map(world.inside_words, words[1:])],
        timeout=timeout,
        world=world.as_dict(),
    )
    answer = launcher.run(request)
    if refused := refusal(folder, world, {}, files.renamed(world)):
        raise MachineRefuses(refused)
    files.prepared(world)
    trouble = f"ended with status {answer['code']}" if answer["code"] else ""
    if answer["timed_out"]:
        trouble = f"took longer than {timeout:g} s: run it before, or allow more with --timeout"
    if trouble:
        text = command.output(folder)
        for old, new in files.renamed(world):
            text = text.replace(old, new)
        raise UserError(
            f"prepare: {shlex.join(words[1:])} {trouble}" + (f"\n{text}" if text else "")
        )
