"""Capacity runs for the measurements of this folder: one launcher, which imports torch once."""

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from verified_fsdp2.verifier.analysis.capacity import Trouble, judge
from verified_fsdp2.verifier.launch.client import Launcher
from verified_fsdp2.verifier.launch.request import Request
from verified_fsdp2.verifier.trace import read_run
from verified_fsdp2.verifier.trace.events import CapacityRecord, End

GIB = 1 << 30
sys.path.append(str(Path(__file__).parents[1]))  # for results_file, after this import


@dataclass(frozen=True)
class Seen:
    """A capacity run as a user meets it.

    `errors`: line and text of what the script raised; `trouble`: what the plan says of it.
    """

    record: CapacityRecord | None
    errors: tuple[str, ...]
    seconds: float
    trouble: Trouble | None = None


class RunForCapacity(Protocol):
    """Try a script; with mode="count" run it on `nproc` ranks, on real tensors whose memory is
    counted in the same way.
    """

    def __call__(
        self,
        script: Path,
        arguments: Sequence[str],
        nproc: int,
        mode: str = "capacity",
        cwd: Path | None = None,
    ) -> Seen: ...


@contextmanager
def capacity_runs_of(steps: int = 2, timeout: float = 900.0) -> Iterator[RunForCapacity]:
    """A function that tries a script as rank 0."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Launcher(sys.executable, Path(folder) / "launcher.log", "cpu") as launcher,
    ):
        made = 0

        def run_for_capacity(
            script: Path,
            arguments: Sequence[str],
            nproc: int,
            mode: str = "capacity",
            cwd: Path | None = None,
        ) -> Seen:
            nonlocal made
            made += 1
            own = Path(folder) / str(made)
            own.mkdir()
            request = Request(
                folder=str(own),
                script=str(script),
                cwd=str(cwd or own),
                world_size=nproc,
                argv=[word.replace("{checkpoint}", str(own / "out")) for word in arguments],
                mode=mode,
                cuda_on_cpu=True,
                steps=steps,
                timeout=timeout,
                per_node=8,
            )
            started = time.monotonic()
            run = read_run(own, "capacity", launcher.run(request), nproc, "")
            records = run.traces[0].records
            record = next(
                (one for one in reversed(records) if isinstance(one, CapacityRecord)), None
            )
            ends = [one for one in records if isinstance(one, End) and one.how == "exception"]
            errors = tuple(
                f"{one.frames[0].code if one.frames else ''} [{one.error}: {one.message[:100]}]"
                for one in ends
            )
            return Seen(record, errors, time.monotonic() - started, judge(run, None).trouble)

        yield run_for_capacity
