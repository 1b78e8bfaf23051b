"""What the proofs of the launch engines share: a small project, processes with an end, what a run
left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from verified_fsdp2.verifier.isolation.proc import descendants
from verified_fsdp2.verifier.launch.processes import runs

STEPS = 30
CLOSE = 1e-5  # losses of other numbers of ranks differ by rounding
SPEC = {
    "version": 1,
    "name": "launched",
    "model": {
        "kind": "decoder",
        "layers": 2,
        "width": 32,
        "heads": 2,
        "vocabulary": 64,
        "sequence_length": 16,
    },
    "data": {"kind": "synthetic", "samples": 256},
    "precision": {"param_dtype": "float32"},
    "train": {"steps": STEPS, "global_batch": 8, "micro_batch": 1},
    "checkpoint": {"interval": 4, "keep": 3},
    "operation": {"start_timeout": 30, "step_timeout": 8},
    "verify": {"reshard_to": []},
}
# A step of the small model takes milliseconds: with this line there is time to disturb it.
STEP_BEGINS = "        metrics.step_begins()\n"
SLOW = '        __import__("time").sleep(0.2)\n' + STEP_BEGINS


class Missing(Exception):
    """What this engine needs is not on this machine."""


def write_project(folder: Path, **launch: Any) -> Path:
    """A generated project, slowed down; nothing else in it is changed."""
    from verified_fsdp2.skill import scaffold, spec

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "spec.yaml"
    path.write_text(
        yaml.safe_dump({**SPEC, "launch": {"device": "cpu", "cpus_per_device": 1, **launch}})
    )
    scaffold.write(scaffold.render(spec.load(path)), folder / "project")
    project = folder / "project"
    text = (project / "train.py").read_text(encoding="utf-8")
    assert text.count(STEP_BEGINS) == 1
    (project / "train.py").write_text(text.replace(STEP_BEGINS, SLOW), encoding="utf-8")
    return project


def environment(**more: str) -> dict[str, str]:
    """That of this process, with this Python first on the path and one thread a rank."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **more}


class Started:
    """A process whose output goes to a file; it is ended with all that it started."""

    def __init__(self, command: list[str], log: Path, cwd: Path, **more: str) -> None:
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command,
                stdout=file,
                stderr=file,
                cwd=cwd,
                env=environment(**more),
                start_new_session=True,
            )
        self.members: set[int] = set()

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait(self, seconds: float) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"still running after {seconds} s:\n{self.said()[-4000:]}") from None

    def note_members(self) -> set[int]:
        self.members |= {self.process.pid, *descendants(self.process.pid)}
        return self.members

    def kill(self) -> None:
        """As when the power fails: no process of it gets to say anything."""
        for pid in self.note_members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)

    def alive(self) -> list[int]:
        return [pid for pid in self.members if runs(pid)]


def until(
    done: Callable[[], Any], seconds: float, what: str, reported: Callable[[], str] = str
) -> float:
    """Wait for something, bounded; how long it took."""
    began = time.monotonic()
    while not done():
        if time.monotonic() - began > seconds:
            raise SystemExit(f"after {seconds} s not yet: {what}\n{reported()[-4000:]}")
        time.sleep(0.1)
    return round(time.monotonic() - began, 1)


def shown_step(text: str) -> int:
    """The last training step in what a run printed."""
    return max((int(number) for number in re.findall(r"step +(\d+)  loss", text)), default=0)


def records(out: Path) -> list[dict[str, Any]]:
    """metrics.jsonl of the newest run."""
    run = sorted(out.glob("run-*"))[-1]
    return [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text().splitlines()
        if line.endswith("}")
    ]


def losses(out: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in records(out) if "loss" in record}


def starts(text: str) -> list[int]:
    """From which step each start of the ranks went on; Ray shows a line more than once."""
    found = [int(step) for step in re.findall(r"run +\S+, step (\d+) of", text)]
    return [step for number, step in enumerate(found) if number == 0 or step != found[number - 1]]


def apart(one: dict[int, float], other: dict[int, float]) -> float:
    """The largest relative difference of two runs; infinite if they do not have the same steps,
    each once.
    """
    if sorted(one) != list(range(1, STEPS + 1)) or sorted(other) != sorted(one):
        return float("inf")
    return max(abs(one[step] - other[step]) / abs(other[step]) for step in one)


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="engines-") as folder:
        yield Path(folder)


def version(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        raise Missing(f"there is no {command[0]} on this machine") from None
    return (done.stdout + done.stderr).strip().splitlines()[0]


@dataclass
class Place:
    """Where the proofs work, what they compare with, and the Pythons of other packages."""

    folder: Path
    losses: dict[int, float]
    pythons: dict[str, str | None]
    made: int = 0

    def fresh(self) -> Path:
        """A folder for one case, which other users may enter."""
        self.made += 1
        folder = self.folder / f"case-{self.made}"
        folder.mkdir()
        return folder

    def judged(
        self, out: Path, said: str, how: str, disturbed: str, happened: str, **more: Any
    ) -> dict[str, Any]:
        """A row: whether the run is the undisturbed one."""
        difference = apart(losses(out), self.losses)
        ok = difference <= CLOSE and more.get("left", 0) == 0
        shown = dict.fromkeys(re.findall(r"run +\S+, step.*|step .*validation loss.*", said))
        return {
            "how": how,
            "disturbed": disturbed,
            "happened": happened,
            "starts": starts(said),
            "printed": [
                re.sub(r"\S*/(out|checkpoints)/", r"\1/", line) for line in list(shown)[-2:]
            ],
            "difference": difference,
            "ok": ok,
            **more,
        }


def reference(folder: Path) -> dict[int, float]:
    """The losses of one process that nothing disturbs."""
    project = write_project(folder, engines=["torchrun"], nodes=1, devices_per_node=2)
    run = Started([sys.executable, "train.py"], folder / "log", project)
    if run.wait(300):
        raise SystemExit(run.said())
    return losses(project / "out")


def ranks_of(run: Started) -> list[int]:
    """The processes of train.py below a launcher."""
    found = []
    for pid in descendants(run.process.pid):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"train.py" in words and not any(word.endswith(b"torchrun") for word in words):
                found.append(pid)
    return sorted(found)
