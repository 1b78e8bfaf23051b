"""Making the runs of one target: folders, arguments, launches side by side where there are cores for them."""

from __future__ import annotations

import math
import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from . import settings
from .errors import MachineRefuses
from .launch import sharing
from .launch.client import Launcher
from .launch.devices import free
from .launch.request import Request
from .launch.trial import shares_a_gpu
from .modules import root
from .resume_runs import SHARED
from .target import Target
from .trace import Run, read_run

GRACE = 8.0
LEAST_TIMEOUT, SLOWER = 60.0, 10.0
MEANT = {"crash": ", as meant: a rank is killed", "damaged": ", as meant: its checkpoint is damaged"}
Progress = Callable[[str, Sequence[str]], None]  # the line of a run that has ended, or ""; the runs that go on


class Runner:
    """Makes the runs of one target, each in a folder of its own."""

    def __init__(
        self,
        launcher: Launcher,
        target: Target,
        work: Path,
        progress: Progress,
        ended: list[Run] | None = None,
        sharing: str | None = None,  # how ranks share GPUs, where that has been tried already
    ) -> None:
        self.ended: list[Run] = [] if ended is None else ended
        self.launcher = launcher
        self.target = target
        self.work = work
        self.progress = progress
        self.made = 0
        self.longest = 0.0
        self.going: list[Pending] = []
        self.secret = os.urandom(16).hex()
        self.checkpoint = work / "checkpoint"
        self.saved = work / "checkpoint.saved"
        self.sharing = self._sharing() if sharing is None else sharing

    def _sharing(self) -> str:
        ranks, devices = max(self.target.nproc, *self.target.reshard_to, 1), self.launcher.versions["devices"]

        def works(backend: str) -> bool:
            return shares_a_gpu(self.launcher, backend, self.work / f"trial-{backend}")

        found = sharing.decide(ranks, devices, self.target.oversubscribe, works)
        if found == "none":
            raise MachineRefuses(f"{ranks} ranks cannot share {devices} CUDA devices here: neither by NCCL nor by gloo")
        return found

    def backend(self, tier: str) -> str:
        """What carries the collectives, as it stands in the report."""
        devices = self.launcher.versions["devices"]
        if self.sharing:
            return sharing.told(self.sharing, self.target.nproc, devices)
        return "fake" if tier == "simulate" else "nccl" if devices else "gloo"

    def notes(self) -> list[str]:
        """What a reader must know of how the runs were made."""
        told = settings.note(self.target.script) if self.target.launcher == "fork" else ""
        return [told] if told else []

    def run(self, role: str, world: int, extra: tuple[str, ...] = (), steps: int | None = None, **options: Any) -> Run:
        """One launch in a role, to its end. `options` are further fields of the Request."""
        return self.start(role, world, extra, steps, **options).run

    def start(
        self, role: str, world: int, extra: tuple[str, ...] = (), steps: int | None = None, **options: Any
    ) -> Pending:
        """Begin a launch beside those that go on, as far as there is a core (or device) for each rank; else after them."""
        while self.going and sum(other.world for other in self.going) + world > self.room:
            _ = self.going[0].run
        self.made += 1
        folder = self.work / f"{self.made:02}-{role}-{world}"
        folder.mkdir(parents=True)
        shared = role in SHARED
        checkpoint = self.checkpoint if shared else folder / "scratch"
        checkpoint.mkdir(exist_ok=True)
        target = self.target
        argv = [word.replace("{checkpoint}", str(checkpoint)) for word in (*self.target.args, *extra)]
        planned = Request(
            folder=str(folder),
            script=str(target.script),
            cwd=str(target.cwd),
            world_size=world,
            argv=argv,
            module=target.module,
            project=str(root(target.script, target.module)),
            launcher=target.launcher,
            devices=free(world, int(self.launcher.versions["devices"]), self._taken),
            backend=self.sharing,
            timeout=self.timeout,
            grace=min(GRACE, self.timeout),
            steps=steps or target.steps,
            secret=self.secret,
            starting_point=str(self.work / "starting_point"),
        )
        request = replace(planned, **options)
        words = ["-m", target.module] if target.module else [target.script.name]
        own = [*words, *target.args, *extra]  # {checkpoint} as it is: its folder is another each time
        command = "" if options.get("open") else shlex.join(own)
        pending = Pending(self, role, request, command, self.launcher.start(request))
        self.going.append(pending)
        self.tell()
        return pending

    @property
    def _taken(self) -> set[int]:
        """The GPUs of the runs that go on."""
        return {number for other in self.going for number in other.devices}

    def tell(self, line: str = "") -> None:
        """Say that a run has ended, with its line, or begun."""
        self.progress(line, [other.name for other in self.going])

    @property
    def timeout(self) -> float:
        """Of a run; once one has ended, the others need not be waited for much longer than for that one: whole minutes."""
        minutes = math.ceil(SLOWER * self.longest / LEAST_TIMEOUT)
        return min(self.target.timeout, LEAST_TIMEOUT * minutes) if minutes else self.target.timeout

    @cached_property
    def room(self) -> int:
        """How many ranks may go on at a time."""
        return int(self.launcher.versions["devices"]) or len(os.sched_getaffinity(0))

    def empty_checkpoint(self) -> None:
        """Give the next run the shared folder as it was before the train run."""
        _remove(self.checkpoint)
        self.checkpoint.mkdir()

    def keep_checkpoint(self) -> str:
        """Put the train run's checkpoint aside, so that every resumed run finds it as it was saved; why that cannot be, or ""."""
        if self.checkpoint.is_symlink() or not self.checkpoint.is_dir():
            return "it is no folder any more"
        try:
            shutil.copytree(self.checkpoint, self.saved, ignore_dangling_symlinks=True)
        except shutil.Error as error:
            return f"{error.args[0][0][0]}: {error.args[0][0][2]}"
        except OSError as error:
            return f"{error.filename}: {error.strerror}"
        return ""

    def restore_checkpoint(self) -> None:
        """Bring the checkpoint back as the train run left it."""
        _remove(self.checkpoint)
        shutil.copytree(self.saved, self.checkpoint)


def _remove(path: Path) -> None:
    """Whatever the last run has made of this folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class Pending:
    """A run that has begun; `run` waits for its end."""

    def __init__(self, runner: Runner, role: str, request: Request, command: str, number: int) -> None:
        self._runner = runner
        self._role = role
        self._request = request
        self._command = command
        self._number = number
        self.world = request.world_size
        self.devices = tuple(request.devices)
        self.name = f"{role} {self._ranks}"

    @property
    def _ranks(self) -> str:
        return "1 rank" if self.world == 1 else f"{self.world} ranks"

    @cached_property
    def run(self) -> Run:
        """What the run left behind."""
        answer = self._runner.launcher.finish(self._number)
        self._runner.going.remove(self)
        request = self._request
        folder, secret = Path(request.folder), request.secret
        run = read_run(folder, self._role, answer, self.world, self._command, request.timeout, secret)
        self._runner.ended.append(run)
        if run.completed:  # what hung says nothing of how long a run takes
            self._runner.longest = max(self._runner.longest, run.seconds)
        meant = MEANT.get(self._role, "")
        ending = "" if run.completed else f"  did not complete{meant}"
        self._runner.tell(f"{self._role:<10} {self._ranks:<8} {run.steps():>3} steps {run.seconds:6.1f} s{ending}")
        return run
