"""Makes planned runs: a folder for each, fresh files, as many at a time as fit, each bounded in
time.
"""

import math
import os
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from .analysis.argparse_errors import usage_error
from .analysis.checkpoints import saved_paths
from .analysis.root_cause import ended_by_native_code, root_cause
from .analysis.steps_to_compare import steps_of
from .analysis.wording import count, cut
from .config.launchers import HERE
from .config.settings import applied
from .errors import MachineRefuses, UserError, starving
from .isolation.refusal import ELSEWHERE, FULL, beyond, refusal, sized
from .isolation.world import World
from .isolation.worlds import Worlds
from .launch import sharing
from .launch.backend_probe import shares_a_gpu
from .launch.client import Launcher
from .launch.devices import free
from .launch.planned import PlannedRun
from .launch.rank_slots import free_memory, room
from .launch.request import Request
from .probe.compat.names import averages, runs_on_cpu
from .tolerances import LEAST_TIMEOUT, SLOWER
from .trace import Run, read_run
from .trace.events import End, Memory

# With less free space no run can record anything: an error of the environment, not a fault.
_LEAST_SPACE = 1 << 20  # bytes that are free where a run can still record something
SHOWN = 90  # characters of why a run did not complete
Progress = Callable[
    [str, Sequence[str]], None
]  # the line of a run that has ended, or ""; the runs that go on


@dataclass(frozen=True)
class Made:
    """A planned run and its result.

    There is no run where its files could not be prepared or the budget is spent: `trouble`.
    """

    planned: PlannedRun
    run: Run | None = None
    trouble: str = ""
    unpaid: bool = False  # whether the budget is spent
    wrote: tuple[str, ...] = ()  # of the user's files


@dataclass
class _Going:
    """A run that has begun."""

    planned: PlannedRun
    request: Request
    number: int
    world: World

    @property
    def name(self) -> str:
        return f"{self.planned.role} {count(self.planned.world_size, 'rank')}"


class Executor:
    """Makes runs below `work`. `ended`: those that have ended, but for discarded ones."""

    def __init__(
        self,
        launcher: Launcher,
        work: Path,
        files: Worlds,
        progress: Progress = lambda line, going: None,
        backend: str = "",
        budget: float = math.inf,
    ) -> None:
        self.launcher, self.work, self.files, self.progress = launcher, work, files, progress
        self.ended: list[Run] = []
        self.backend, self.budget, self._begun = backend, budget, time.monotonic()
        self.longest = 0.0
        self.own, self.free = 0, free_memory()  # bytes that a rank took so far, and that there were
        self._number = 0
        self._going: list[_Going] = []
        self._secret = os.urandom(16).hex()

    @cached_property
    def averages(self) -> bool:
        """Whether the probe averages in gloo's place, which this torch is not known to do."""
        versions = self.launcher.versions
        return not (versions["devices"] or averages(versions.get("torch", "")))

    def make(self, planned: Sequence[PlannedRun]) -> list[Made]:
        """All of these runs, in any order, to their ends.

        Raises UserError if the script refuses arguments that the user gave.

        A run that native code has ended is made once more: what does not happen again is no fault
        of the script.
        """
        waiting, made, again = list(planned), dict[int, Made](), list[PlannedRun]()
        while waiting or self._going:
            for run in [run for run in waiting if self._fits(run)]:
                if self._fits(run):
                    waiting.remove(run)
                    if (unmade := self._begin(run)) is not None:
                        made[id(run)] = unmade
            if self._going:
                number = self.launcher.first_to_end([one.number for one in self._going])
                done = self._finish(next(one for one in self._going if one.number == number))
                made[id(done.planned)] = done
                crashed = done.run is not None and ended_by_native_code(done.run)
                # What native code ended is made once more: what does not happen again is no fault
                # of the script (test_a_run_that_native_code_ended_is_made_once_more).
                if crashed and done.planned not in again:
                    again.append(done.planned)
                    waiting.append(done.planned)
        found = [made[id(run)] for run in planned]
        for one in found:
            if one.run is not None and one.planned.given and (words := usage_error(one.run)):
                raise UserError(
                    f"the script refuses {one.planned.given} (its {one.planned.role} run): {words}"
                )
        return found

    @property
    def room(self) -> int:
        """How many ranks may go on at a time."""
        return room(int(self.launcher.versions["devices"]), self.own, self.free)

    def timeout(self, planned: PlannedRun) -> float:
        """Once a run has ended, the limit for others is a multiple of its time, in whole
        minutes.
        """
        minutes = math.ceil(SLOWER * self.longest / LEAST_TIMEOUT)
        return min(planned.timeout, LEAST_TIMEOUT * minutes) if minutes else planned.timeout

    def _fits(self, planned: PlannedRun) -> bool:
        """Whether a run can begin now: there is room, and none beside it needs the same folder."""
        if not self._going:
            return True
        if planned.launcher not in HERE:
            return False  # nodes make one run at a time
        ranks = sum(other.planned.world_size for other in self._going) + planned.world_size
        taken = any(self.files.exclusive(other.planned.files) for other in self._going)
        return ranks <= self.room and not (taken and self.files.exclusive(planned.files))

    def discard(self, made: Sequence[Made]) -> None:
        """Leave runs out of those that have ended: they are made again in another way."""
        gone = [one.run for one in made]
        self.ended = [run for run in self.ended if not any(run is one for one in gone)]

    def _begin(self, planned: PlannedRun) -> Made | None:
        """Start a run; why it cannot be made, or None.

        The budget is judged by the longest run so far.
        """
        if self.longest and time.monotonic() - self._begun + self.longest > self.budget:
            return Made(planned, None, f"left out by --budget {self.budget:g}", unpaid=True)
        self._number += 1
        folder = self.work / f"{self._number:02}-{planned.role}-{planned.world_size}"
        folder.mkdir(parents=True)
        self._must_fit()
        try:
            world = self.files.begin(folder, planned.files)
        except OSError as error:
            if error.errno in FULL:
                raise MachineRefuses(
                    f"no space left for the files of a run: {error.filename}; {ELSEWHERE}"
                ) from None
            return Made(planned, None, f"{error.filename}: {error.strerror}")
        request = self._request(planned, folder, world)
        self._going.append(_Going(planned, request, self.launcher.start(request), world))
        self._report()
        return None

    def _must_fit(self) -> None:
        """Raises MachineRefuses where the disk has no space for what a run writes, as far as
        earlier ones show that.
        """
        free = shutil.disk_usage(self.work).free
        if free < self.files.largest:
            need = sized(self.files.largest)
            raise MachineRefuses(
                f"no space left in {self.work.parent}: a run needs {need}, {sized(free)} are free;"
                f" {ELSEWHERE}"
            )

    def _must_have_space(self, failed: bool = False) -> None:
        """Raises MachineRefuses where a run has ended because the disk is full; `failed`: it says
        so itself.
        """
        free = shutil.disk_usage(self.work).free
        if failed or free < _LEAST_SPACE:
            if self.files.largest:
                took = f"{sized(self.files.largest)} were enough for the largest run before"
            else:
                whole = sized(shutil.disk_usage(self.work).total)
                took = f"a run needs more than the {whole} of this file system"
            raise MachineRefuses(
                f"no space left in {self.work.parent} for a run: {took}; {sized(free)} are free;"
                f" {ELSEWHERE}"
            )

    def _request(self, planned: PlannedRun, folder: Path, world: World) -> Request:
        """The request for the launcher."""
        taken = {number for other in self._going for number in other.request.devices}
        same = {
            name: getattr(planned, name)
            for name in ("world_size", "module", "launcher", "grace", "mode", "steps")
        }
        same |= {
            name: world.inside(str(getattr(planned, name))) for name in ("script", "cwd", "project")
        }
        argv, copies = applied(planned.arguments, planned.cwd, world.checkpoint, folder)
        for path, text in copies.items():
            path.write_text(text, encoding="utf-8")
        damage = {"paths": self._saved(planned.damaged, world), "kind": planned.damage}
        probe = dict(planned.probe)
        if "lines" in probe:
            probe["lines"] = {world.inside(file): lines for file, lines in probe["lines"].items()}
        return Request(
            folder=str(folder),
            argv=[world.inside_words(word) for word in argv],
            devices=free(planned.world_size, int(self.launcher.versions["devices"]), taken),
            backend=self.backend,
            cuda_on_cpu=planned.cuda_on_cpu,
            averages=self.averages,
            timeout=self.timeout(planned),
            secret=self._secret,
            starting_point=str(self.work / planned.weights) if planned.starting_point else "",
            open=self._saved(planned.opens, world),
            damage=damage if planned.damage else {},
            checkpoint=world.checkpoint,
            world=world.as_dict(),
            **same,
            **probe,
        )

    def _saved(self, paths: Sequence[str], world: World) -> list[str]:
        """Paths of checkpoints, as a run sees them."""
        here = str(self.files.checkpoint)
        return [world.inside(path.replace(here, world.checkpoint, 1)) for path in paths]

    def _finish(self, going: _Going) -> Made:
        """Wait for the end of a run."""
        try:
            answer = self.launcher.finish(going.number)
        except RuntimeError:
            self._must_have_space()
            raise
        self._going.remove(going)
        planned = going.planned
        run = self._read(going, answer)
        self._must_not_be_refused(going, run)
        if planned.damage and not run.note:
            return Made(planned, None, "no file of the last save was found")
        wrote = self.files.end(
            going.world, saved_paths(run), keeps=planned.keeps, leaves=planned.leaves
        )
        self.ended.append(run)
        self.own = max(self.own, *((m.peak or 0) - (m.before or 0) for m in run.all(Memory)), 0)
        # The time of a run that hung, or trained nothing, says nothing about other runs.
        if run.completed and run.steps():
            self.longest = max(self.longest, run.seconds)
        self._report(_in_one_line(going, run))
        return Made(planned, run, wrote=tuple(wrote))

    def _read(self, going: _Going, answer: dict[str, Any]) -> Run:
        """A run that has ended, with its note."""
        planned, request = going.planned, going.request
        run = read_run(
            Path(request.folder),
            planned.role,
            answer,
            planned.world_size,
            _command(planned),
            request.timeout,
            request.secret,
            self.files.renamed(going.world),  # every run's {checkpoint} reads as the common one
        )
        note = answer["note"] if planned.damage else shlex.join(planned.derived) or planned.note
        return replace(run, note=note)

    def _must_not_be_refused(self, going: _Going, run: Run) -> None:
        """Raise MachineRefuses where the machine, and not the script, ended a run."""
        folder, places = Path(going.request.folder), self.files.renamed(going.world)
        if refused := refusal(folder, going.world, run.stacks, places):
            raise MachineRefuses(refused)
        ends = [end.message for end in run.all(End) if end.how == "exception"]
        if not run.completed:
            # of a thread that could not be started; a BlockingIOError is a lock of the script's, a
            # MemoryError its own
            threads = [end.message for end in run.all(End) if end.error == "RuntimeError"]
            threads = [text for text in threads if "unavailable" in text or "new thread" in text]
            if said := next(filter(None, map(starving, threads)), ""):
                raise MachineRefuses(f"the {going.planned.role} run stopped: {said}")
            self._must_have_space(
                any(f"[Errno {number}]" in message for message in ends for number in FULL)
            )
        for message in ends:
            if refused := beyond(going.world.mechanism, message):
                raise MachineRefuses(refused)

    def _report(self, line: str = "") -> None:
        self.progress(line, [other.name for other in self._going])


def backend_for(launcher: Launcher, ranks: int, oversubscribe: bool, work: Path) -> str:
    """How ranks share GPUs, "" if they need not.

    Raises MachineRefuses if they cannot, or if this torch needs GPUs and there are none.
    """
    devices, torch = launcher.versions["devices"], str(launcher.versions.get("torch", ""))
    if torch and not devices and not runs_on_cpu(torch):
        raise MachineRefuses(
            f"FSDP2 of torch {torch} does not train on the CPU: use a machine with GPUs, or torch"
            " 2.7 or later"
        )
    found = sharing.decide(
        ranks,
        devices,
        oversubscribe,
        lambda name: shares_a_gpu(launcher, name, work / f"trial-{name}"),
    )
    if found == "none":
        raise MachineRefuses(
            f"{ranks} ranks cannot share {devices} CUDA devices here: neither by NCCL nor by gloo"
        )
    return found


def _command(planned: PlannedRun) -> str:
    """The command line without torchrun; `{checkpoint}` stays as it is, since its folder is another
    each time.
    """
    words = ["-m", planned.module] if planned.module else [planned.script.name]
    return "" if planned.opens else shlex.join([*words, *planned.arguments])


def _in_one_line(going: _Going, run: Run) -> str:
    """What the progress says of a run that has ended."""
    planned = going.planned
    ranks = count(planned.world_size, "rank")
    made = count(steps_of(run) if planned.mode == "survey" else run.steps(), "step")
    line = f"{planned.role:<15} {ranks:<8} {made:>8} {run.seconds:6.1f} s"
    if run.completed:
        return line
    expected = planned.expected if run.timed_out or planned.role != "survey" else ""
    if expected:
        return f"{line}  did not complete, expected: {expected}"
    over = f"its {going.request.timeout:g} s were over"
    own = over if run.timed_out else root_cause(run).text
    return f"{line}  did not complete: {cut(own, SHOWN)}"
