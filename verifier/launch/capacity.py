"""Capacity runs: one process runs a script as rank 0 of many, on tensors without memory; several
scripts at a time.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from ..config.settings import applied
from ..errors import MachineRefuses
from ..isolation.refusal import refusal
from ..isolation.world import World
from ..isolation.worlds import Worlds, wish
from ..trace import Run, read_run
from .client import Launcher
from .planned import PlannedRun
from .preparation import prepare
from .request import Request

STEPS = 3  # the first one, which makes the optimizer's state, and two more
PER_NODE = 8
_Going = tuple[int, Request, PlannedRun, Worlds, World]
Due = tuple[
    PlannedRun, Path
]  # what is run, and the folder for what it records and writes to `{checkpoint}`


def run_for_capacity(
    planned: PlannedRun,
    work: Path,
    python: str,
    per_node: int = PER_NODE,
    preparation: Sequence[str] = (),
) -> Run:
    """Make the run, as rank 0 of its world size, after a command that prepares it."""
    with Launcher(
        python, work / "launcher.log", "cpu", wish=wish(work, planned.project, planned.cwd)
    ) as launcher:
        files = Worlds(work, [planned.project], planned.cwd, launcher.choice)
        if preparation:
            prepare(launcher, files, preparation, planned.timeout)
        request, world = _request(planned, work, files, per_node)
        return _read(request, planned, launcher.run(request), files, world)


class CapacityRuns:
    """A context manager: many capacity runs in one launcher, `at_once` of them at a time, until
    `until` (`time.monotonic`).
    """

    def __init__(
        self,
        work: Path,
        python: str,
        per_node: int,
        at_once: int,
        until: float,
        prepared: Path | None = None,
    ) -> None:
        self._launcher = Launcher(python, work / "launcher.log", "cpu", wish=wish(work))
        self._per_node, self._at_once, self._until = per_node, at_once, until
        self._work, self._prepared = work, prepared

    def __enter__(self) -> CapacityRuns:
        self._launcher.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._launcher.__exit__(*error)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self._until - time.monotonic()

    def run(self, due: Sequence[Due], ended: Callable[[], None] = lambda: None) -> list[Run | None]:
        """The runs, in this order; None for those that did not end in time.

        `ended` is called after each.
        """
        found: list[Run | None] = [None] * len(due)
        waiting, running = deque(enumerate(due)), dict[int, _Going]()
        while waiting or running:
            while waiting and len(running) < self._at_once and self.left > 0:
                place, (planned, work) = waiting.popleft()
                files = Worlds(
                    self._work,
                    [planned.project],
                    planned.cwd,
                    self._launcher.choice,
                    prepared=self._prepared,
                )
                request, world = _request(
                    planned, work, files, self._per_node, min(planned.timeout, self.left)
                )
                running[self._launcher.start(request)] = place, request, planned, files, world
            if not running:
                break
            try:
                number = self._launcher.first_to_end(list(running))
            except RuntimeError:  # a launcher that does not answer any more
                if self.left > 0:
                    raise
                break
            place, request, planned, files, world = running.pop(number)
            run = _read(request, planned, self._launcher.finish(number), files, world)
            if not run.timed_out or request.timeout == planned.timeout:
                found[place] = run
                ended()
        return found


def _request(
    planned: PlannedRun, work: Path, files: Worlds, per_node: int, timeout: float | None = None
) -> tuple[Request, World]:
    folder = work / "run"
    folder.mkdir(parents=True)
    world = files.begin(folder, "scratch")
    argv, copies = applied(planned.arguments, planned.cwd, world.checkpoint, folder)
    for path, text in copies.items():
        path.write_text(text, encoding="utf-8")
    request = Request(
        folder=str(folder),
        script=world.inside(str(planned.script)),
        cwd=world.inside(str(planned.cwd)),
        module=planned.module,
        project=world.inside(str(planned.project)),
        argv=[world.inside_words(word) for word in argv],
        checkpoint=world.checkpoint,
        world=world.as_dict(),
        world_size=planned.world_size,
        per_node=per_node,
        mode="capacity",
        cuda_on_cpu=True,
        steps=planned.steps,
        timeout=planned.timeout if timeout is None else timeout,
        secret=os.urandom(16).hex(),
        **planned.probe,
    )
    return request, world


def _read(
    request: Request, planned: PlannedRun, answer: dict[str, object], files: Worlds, world: World
) -> Run:
    folder, places = Path(request.folder), files.renamed(world)
    run = read_run(
        folder,
        planned.role,
        answer,
        planned.world_size,
        "",
        request.timeout,
        request.secret,
        places,
    )
    if refused := refusal(folder, world, run.stacks, places):
        raise MachineRefuses(refused)
    files.end(world, (), keeps=False, leaves=False)
    return run
