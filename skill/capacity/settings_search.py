"""`fsdp2 plan --explore`: try many settings of one target, several at a time, within a number
of them and a time.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...verifier.analysis.capacity import CapacityPlan, judge
from ...verifier.analysis.settings_search import Candidate, Explored, accumulated
from ...verifier.isolation.leftovers import remove
from ...verifier.launch.capacity import CapacityRuns
from . import target as targets
from .candidates import Choice, Knob, Measure, Search
from .lower_bound import least, mesh_on
from .settings import OFFLOAD, TWO, OfSpec, as_arguments, shortened

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...verifier.config.devices import Device
    from ...verifier.config.target import Target
    from ...verifier.launch.planned import PlannedRun
    from ...verifier.trace import Run
    from ..spec import Spec

MOST = 32  # capacity runs of one exploration


@dataclass(frozen=True)
class Limits:
    """What bounds an exploration, and what it is judged by."""

    memory: int | None
    gpu: Device | None
    per_node: int
    until: float  # `time.monotonic`
    most: int = MOST
    at_once: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    note: Callable[[str], None] = lambda text: None
    prepared: Path | None = None  # the world of a preparation (launch/preparation.py)


@dataclass(frozen=True)
class Due:
    """A candidate that can be tried.

    `passes`: forward passes of its step, of which `TWO` at most are run.
    """

    settings: dict[str, str]
    run: PlannedRun
    passes: int = TWO
    spec: Spec | None = None  # None for a script


def explore_spec(
    of: OfSpec,
    limits: Limits,
    work: Path,
    grid: Sequence[Knob] = (),
    given: CapacityPlan | None = None,
) -> Explored:
    """Settings of a spec that change no mathematics: all, or the user's own `grid` of its keys.

    `given`: the plan of the spec as it is, if there is one.
    """

    def due(choice: Choice, folder: Path) -> Due | str:
        from ..spec import SpecError

        keys = _shown(choice) if grid else of.written(choice)
        try:
            spec, keys = of.read(keys)
        except SpecError as error:
            return error.problems[0].message
        bound = least(spec, mesh_on(spec, of.ranks))
        if bound is not None and limits.memory is not None and bound.bytes > limits.memory:
            return "surely more than a device has, without a rehearsal"
        small, passes = shortened(spec, of.ranks)
        target = targets.of_spec(
            small, folder / "project", of.ranks, max(limits.until - time.monotonic(), 1.0)
        )
        return Due(keys, targets.planned(target, TWO), passes, spec)

    def search(measure: Measure) -> Search:
        if grid:
            return Search(grid, measure, limits.most, limits.at_once, limits.memory)
        last = "" if limits.gpu else OFFLOAD
        first = None
        if given is not None:
            first = _judged(of.written({}), given, of.spec, of.ranks, limits)
        knobs, most, at_once = of.knobs(), limits.most, limits.at_once
        return Search(knobs, measure, most, at_once, limits.memory, last, of.extremes(), first)

    return _explored(search, due, limits, work)


def explore_script(
    target: Target, knobs: Sequence[Knob], limits: Limits, work: Path, steps: int = TWO
) -> Explored:
    """The user's own grid of a script's arguments."""

    def due(choice: Choice, folder: Path) -> Due | str:
        given = {
            name: "" if value is True else str(value)
            for name, value in choice.items()
            if value is not False
        }
        run = targets.planned(target, steps)
        return Due(given, replace(run, arguments=(*run.arguments, *as_arguments(choice))))

    def search(measure: Measure) -> Search:
        return Search(knobs, measure, limits.most, limits.at_once, limits.memory)

    return _explored(search, due, limits, work)


def _explored(
    plan: Callable[[Measure], Search],
    due: Callable[[Choice, Path], Due | str],
    limits: Limits,
    work: Path,
) -> Explored:
    """Search, with the launcher and its folders."""
    work.mkdir()
    with CapacityRuns(
        work, sys.executable, limits.per_node, limits.at_once, limits.until, limits.prepared
    ) as runs:
        search = plan(_Trials(due, limits, runs, work).measure)
        found = search.run()
    name = limits.gpu.name if limits.gpu else ""
    return Explored(tuple(found), search.possible, limits.memory, name, runs.left <= 0)


class _Trials:
    """Tries choices of settings, each in a folder of its own."""

    def __init__(
        self,
        due: Callable[[Choice, Path], Due | str],
        limits: Limits,
        runs: CapacityRuns,
        work: Path,
    ) -> None:
        self._due, self._limits, self._runs, self._work = due, limits, runs, work
        self._made = 0

    def measure(self, choices: Sequence[Choice]) -> list[Candidate | None]:
        """A candidate for each choice; None for those that did not end in time."""
        if self._runs.left <= 0:
            return [None] * len(choices)
        folders = [self._folder() for _ in choices]
        found = [self._due(*one) for one in zip(choices, folders, strict=True)]
        waiting = [
            (one.run, folder / "made")
            for one, folder in zip(found, folders, strict=True)
            if isinstance(one, Due)
        ]
        ended = iter(self._runs.run(waiting))
        for folder in folders:
            remove(folder)
        self._limits.note(f"{self._made} settings tried; {max(self._runs.left, 0):.0f} s left")
        return [
            (
                _candidate(one, next(ended), self._limits)
                if isinstance(one, Due)
                else Candidate(_shown(choice), refused=one)
            )
            for one, choice in zip(found, choices, strict=True)
        ]

    def _folder(self) -> Path:
        self._made += 1
        folder = self._work / str(self._made)
        folder.mkdir()
        return folder


def _candidate(one: Due, run: Run | None, limits: Limits) -> Candidate | None:
    if run is None:
        return None
    found = tried(judge(run, limits.memory), one.passes)
    return _judged(one.settings, found, one.spec, one.run.world_size, limits)


def _judged(
    settings: Mapping[str, str], found: CapacityPlan, spec: Spec | None, ranks: int, limits: Limits
) -> Candidate:
    gpu = limits.gpu.with_node(limits.per_node) if limits.gpu is not None else None
    bound = targets.least_time(found.record, gpu, spec, ranks)
    offload = spec is not None and bool(spec["parallel"]["cpu_offload"])
    return Candidate(settings, found, bound, offload, found.trouble.text if found.trouble else "")


def tried(found: CapacityPlan, passes: int) -> CapacityPlan:
    """With the traffic and the work of all forward passes of a step, of which `TWO` were run."""
    if found.record is None or passes <= TWO:
        return found
    return replace(found, record=accumulated(found.record, passes))


def _shown(choice: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in choice.items()}
