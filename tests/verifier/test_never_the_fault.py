"""What the verifier itself does to a run, or fails to do, is never reported as a fault of the script."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from verified_fsdp2.verifier.launch.client import Launcher
from verified_fsdp2.verifier.launch.request import Request
from verified_fsdp2.verifier.probe.hooks_progress import Progress
from verified_fsdp2.verifier.probe.recorder import Recorder
from verified_fsdp2.verifier.trace import Run, read_run

MINIMAL = Path(__file__).parents[1] / "zoo" / "minimal.py"

DRAWS = """\
import json, os, random, sys

def draws():
    import numpy, torch
    numbers = {"python": random.random(), "numpy": float(numpy.random.rand()), "seed": torch.initial_seed()}
    return {**numbers, "torch": torch.rand(4, dtype=torch.float64).tolist()}

print(json.dumps(draws()))
"""


def launch(launcher: Launcher, folder: Path, script: Path, **more: Any) -> dict[str, Any]:
    folder.mkdir()
    return launcher.run(Request(str(folder), str(script), str(script.parent), world_size=2, **more))


def edited(tmp_path: Path, *changes: tuple[str, str]) -> Path:
    """The minimal script with some of its text replaced."""
    text = MINIMAL.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    script = tmp_path / "train.py"
    script.write_text(text)
    return script


# -- random state -----------------------------------------------------------------------------------------------------


@pytest.mark.launch
def test_ranks_without_a_seed_draw_what_separate_processes_draw(launcher: Launcher, tmp_path: Path) -> None:
    """Measured with torchrun: each rank, and each run, has its own seed of Python, NumPy and torch."""
    script = tmp_path / "draws.py"
    script.write_text(DRAWS)
    drawn = []
    for run in ("first", "second"):
        launch(launcher, tmp_path / run, script)
        drawn += [json.loads((tmp_path / run / f"rank{rank}.out").read_text()) for rank in range(2)]
    for generator in ("python", "numpy", "seed", "torch"):
        values = [str(rank[generator]) for rank in drawn]
        assert len(set(values)) == len(values), generator


@pytest.mark.launch
def test_a_script_without_a_seed(verify_script: Any, tmp_path: Path) -> None:
    script = edited(
        tmp_path,
        ("torch.manual_seed(SEED)", "pass"),
        ("batch = tokens[start : start + local]", "batch = torch.randint(0, VOCAB, (local, SEQ + 1))"),
    )
    verdict = verify_script(script, only=("same-data-on-every-rank", "rank-dependent-init-no-broadcast"))
    found = {finding.rule: finding.status for finding in verdict.findings}
    assert found == {"same-data-on-every-rank": "pass", "rank-dependent-init-no-broadcast": "fail"}


# -- threads and signals ----------------------------------------------------------------------------------------------


@pytest.fixture
def hurried() -> Iterator[None]:
    """Threads take turns all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def read(folder: Path) -> Run:
    answer = {"ranks": [{"rank": 0, "code": 0, "killed": False, "at": 1.0}], "timed_out": False, "seconds": 1.0}
    return read_run(folder, "train", answer, 1, "train.py", secret="secret")


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_trace_that_many_threads_write(hurried: None, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "rank0.jsonl", str(tmp_path), "secret")

    def write(thread: int) -> None:
        for number in range(200):
            recorder.write("saved", thread=thread, number=number, long="x" * (number % 7 * 500))

    threads = [threading.Thread(target=write, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    forked = []
    for _ in range(5):  # while a thread holds the lock
        if (pid := os.fork()) == 0:
            recorder.write("from a fork")
            os._exit(0)
        forked.append(pid)
    for thread in threads:
        thread.join()
    assert [os.waitpid(pid, 0)[1] for pid in forked] == [0] * 5
    recorder.write("end", how="return", code=0)
    run = read(tmp_path)
    assert run.foreign == ""
    records = run.traces[0].records
    assert [r["seq"] for r in records] == list(range(1, 8 * 200 + 2))
    for k in range(8):
        assert [r["number"] for r in records if r.get("thread") == k] == list(range(200))


def test_a_trace_that_a_signal_handler_writes_too(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "rank0.jsonl", str(tmp_path), "secret")
    handled = 0

    def handle(number: int, frame: object) -> None:
        nonlocal handled
        handled += 1
        recorder.write("handled")

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
        for _ in range(3000):
            recorder.write("written", long="x" * 2000)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    run = read(tmp_path)
    assert run.foreign == ""
    assert handled > 10
    assert len(run.traces[0].of("handled")) == handled


def test_a_record_that_cannot_be_written_leaves_no_gap(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "rank0.jsonl", str(tmp_path), "secret")
    with pytest.raises(TypeError):
        recorder.write("bad", value=object())
    recorder.write("end", how="return", code=0)
    assert read(tmp_path).completed


def test_a_progress_log_with_threads_and_a_signal_handler(hurried: None, tmp_path: Path) -> None:
    class Session:
        recorder = Recorder(tmp_path / "rank0.jsonl", str(Path(__file__).parent), "secret")
        depth, in_backward = 0, False

    progress = Progress(Session())  # type: ignore[arg-type]

    def event(name: str) -> None:
        if progress.listens:
            progress.log(name)

    def handle(number: int, frame: object) -> None:
        event(f"handler {number}")

    threads = [threading.Thread(target=lambda: [event("thread") for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
        for number in range(1000):
            event(f"main {number}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    for thread in threads:
        thread.join()
    run = read(tmp_path)
    assert run.foreign == ""
    events = [e["op"] for e in run.progress[0] if not e["op"].startswith("handler")]
    assert events == [f"main {number}" for number in range(1000)]


# -- paths of fully_shard ---------------------------------------------------------------------------------------------

IMPORT = "from torch.distributed.fsdp import fully_shard"


@pytest.mark.launch
@pytest.mark.parametrize(
    "words",
    [
        "from torch.distributed._composable.fsdp import fully_shard",
        "from torch.distributed._composable.fsdp.fully_shard import fully_shard",
        "import torch.distributed._composable.fsdp.fully_shard\nfrom torch.distributed._composable.fsdp import fully_shard",
        "from torch.distributed.fsdp._fully_shard._fully_shard import fully_shard",
    ],
    ids=["composable", "composable module", "composable module imported", "private"],
)
def test_fully_shard_by_other_paths(launcher: Launcher, tmp_path: Path, words: str) -> None:
    script = edited(tmp_path, (IMPORT, words))
    answer = launch(launcher, tmp_path / "run", script, steps=1)
    run = read_run(tmp_path / "run", "train", answer, 2, "train.py")
    assert run.completed
    assert [[len(trace.of(kind)) for kind in ("shard", "wrap")] for trace in run.traces] == [[3, 3], [3, 3]]


@pytest.mark.launch
def test_ddp_stands_in_for_fully_shard_by_an_old_path(launcher: Launcher, tmp_path: Path) -> None:
    script = edited(tmp_path, (IMPORT, "from torch.distributed._composable.fsdp.fully_shard import fully_shard"))
    answer = launch(launcher, tmp_path / "run", script, steps=1, mode="ddp")
    run = read_run(tmp_path / "run", "reference", answer, 2, "train.py")
    assert run.completed
    assert not any(entry["sharded"] for entries in run.parameters.values() for entry in entries)
