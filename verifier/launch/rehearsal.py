"""Rehearsals: one process runs a script as rank 0 of many, on tensors without memory; several scripts at a time."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from ..config.settings import applied
from ..trace import Run, read_run
from .client import Launcher
from .planned import PlannedRun
from .request import Request

STEPS = 3  # the first one, which makes the optimizer's state, and two more
PER_NODE = 8
Due = tuple[PlannedRun, Path]  # what is run, and the folder for what it records and writes to `{checkpoint}`


def rehearse(planned: PlannedRun, work: Path, python: str, per_node: int = PER_NODE) -> Run:
    """Make the run, as rank 0 of its world size."""
    with Launcher(python, work / "launcher.log", "cpu") as launcher:
        request = _request(planned, work, per_node)
        return _read(request, planned, launcher.run(request))


class Rehearsals:
    """A context manager: many rehearsals in one launcher, `at_once` of them at a time, until `until` (`time.monotonic`)."""

    def __init__(self, work: Path, python: str, per_node: int, at_once: int, until: float) -> None:
        self._launcher = Launcher(python, work / "launcher.log", "cpu")
        self._per_node, self._at_once, self._until = per_node, at_once, until

    def __enter__(self) -> Rehearsals:
        self._launcher.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._launcher.__exit__(*error)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self._until - time.monotonic()

    def run(self, due: Sequence[Due], ended: Callable[[], None] = lambda: None) -> list[Run | None]:
        """The runs, in this order; None for those that did not end in time. `ended` is called after each."""
        found: list[Run | None] = [None] * len(due)
        waiting, running = deque(enumerate(due)), dict[int, tuple[int, Request, PlannedRun]]()
        while waiting or running:
            while waiting and len(running) < self._at_once and self.left > 0:
                place, (planned, work) = waiting.popleft()
                request = _request(planned, work, self._per_node, min(planned.timeout, self.left))
                running[self._launcher.start(request)] = place, request, planned
            if not running:
                break
            try:
                number = self._launcher.first_to_end(list(running))
            except RuntimeError:  # a launcher that does not answer any more
                if self.left > 0:
                    raise
                break
            place, request, planned = running.pop(number)
            run = _read(request, planned, self._launcher.finish(number))
            if not run.timed_out or request.timeout == planned.timeout:
                found[place] = run
                ended()
        return found


def _request(planned: PlannedRun, work: Path, per_node: int, timeout: float | None = None) -> Request:
    folder, outputs = work / "run", work / "checkpoint"
    for path in (folder, outputs):
        path.mkdir(parents=True)
    argv, copies = applied(planned.arguments, planned.cwd, str(outputs), folder)
    for path, text in copies.items():
        path.write_text(text, encoding="utf-8")
    return Request(
        folder=str(folder),
        script=str(planned.script),
        cwd=str(planned.cwd),
        module=planned.module,
        project=str(planned.project),
        argv=argv,
        world_size=planned.world_size,
        per_node=per_node,
        mode="rehearse",
        cuda_on_cpu=True,
        steps=planned.steps,
        timeout=planned.timeout if timeout is None else timeout,
        secret=os.urandom(16).hex(),
    )


def _read(request: Request, planned: PlannedRun, answer: dict[str, object]) -> Run:
    return read_run(Path(request.folder), planned.role, answer, planned.world_size, "", request.timeout, request.secret)
