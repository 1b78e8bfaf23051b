"""What the verifier itself does to a run, or fails to do, is never reported as a fault of the
script.
"""

import colorsys
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from made_up import made_up_rule

from records import Patch, cases, end, run, steps, trace
from scripts import ZOO, edited, written
from verdicts import verdict
from verified_fsdp2.verifier.errors import OUR_FAULT, PROBE_FAILED, UserError
from verified_fsdp2.verifier.evidence import Evidence
from verified_fsdp2.verifier.finding import Finding
from verified_fsdp2.verifier.judge import judge
from verified_fsdp2.verifier.launch.client import Launcher
from verified_fsdp2.verifier.launch.request import Request
from verified_fsdp2.verifier.probe.dispatcher import Call, Dispatcher
from verified_fsdp2.verifier.probe.events.progress import Progress
from verified_fsdp2.verifier.probe.frames import Frames
from verified_fsdp2.verifier.probe.optimizer_ids import Turns
from verified_fsdp2.verifier.probe.probe_errors import ProbeErrors
from verified_fsdp2.verifier.probe.session import StepProgress
from verified_fsdp2.verifier.probe.stop_run import StopRun
from verified_fsdp2.verifier.report import RENDERERS
from verified_fsdp2.verifier.rules import RULES
from verified_fsdp2.verifier.trace import Ended, Run, read_run
from verified_fsdp2.verifier.trace.events import (
    Discarded,
    End,
    ProbeError,
    Shard,
    Start,
    Wrap,
    Zeroed,
)
from verified_fsdp2.verifier.trace.writer import Writer
from verified_fsdp2.verifier.verdict import Verdict

DRAWS = """\
import json, os, random, sys

def draws():
    import numpy, torch
    numbers = {"python": random.random(), "numpy": float(numpy.random.rand())}
    numbers["seed"] = torch.initial_seed()
    return {**numbers, "torch": torch.rand(4, dtype=torch.float64).tolist()}

print(json.dumps(draws()))
"""


def launch(launcher: Launcher, folder: Path, script: Path, **more: Any) -> dict[str, Any]:
    folder.mkdir()
    return launcher.run(Request(str(folder), str(script), str(script.parent), world_size=2, **more))


# -- random state


def test_ranks_without_a_seed_draw_what_separate_processes_draw(
    launcher: Launcher, tmp_path: Path
) -> None:
    """Measured with torchrun: each rank, and each run, has its own seed of Python, NumPy and
    torch.
    """
    script = written(tmp_path, DRAWS, "draws.py")
    drawn = []
    for name in ("first", "second"):
        launch(launcher, tmp_path / name, script)
        drawn += [
            json.loads((tmp_path / name / f"rank{rank}.out").read_text()) for rank in range(2)
        ]
    for generator in ("python", "numpy", "seed", "torch"):
        assert len({str(rank[generator]) for rank in drawn}) == len(drawn), generator


@pytest.mark.full
def test_a_script_without_a_seed(verify_script: Any, tmp_path: Path) -> None:
    script = edited(
        tmp_path,
        ("torch.manual_seed(SEED)", "pass"),
        (
            "batch = tokens[start : start + local]",
            "batch = torch.randint(0, VOCAB, (local, SEQ + 1))",
        ),
    )
    findings = verify_script(
        script, only=("same-data-on-every-rank", "rank-dependent-init-no-broadcast")
    ).findings
    found = {finding.rule: finding.status for finding in findings}
    assert found == {"same-data-on-every-rank": "pass", "rank-dependent-init-no-broadcast": "fail"}


# -- threads and signals
# ----------------------------------------------------------------------------------------------


@pytest.fixture
def hurried() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def read(folder: Path) -> Run:
    answer = {
        "ranks": [{"rank": 0, "code": 0, "killed": False, "at": 1.0}],
        "timed_out": False,
        "seconds": 1.0,
    }
    return read_run(folder, "train", answer, 1, "train.py", secret="secret")


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_trace_that_many_threads_write(hurried: None, tmp_path: Path) -> None:
    writer = Writer(tmp_path / "rank0.jsonl", "secret")

    def write(thread: int) -> None:
        for number in range(200):
            writer.write(
                Zeroed(step=thread, unsynced=[str(number), "x" * (number % 7 * 500)], at_line=None)
            )

    threads = [threading.Thread(target=write, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    forked = []
    for _ in range(5):  # while a thread holds the lock
        if (pid := os.fork()) == 0:
            writer.write(Discarded())
            os._exit(0)
        forked.append(pid)
    for thread in threads:
        thread.join()
    assert [os.waitpid(pid, 0)[1] for pid in forked] == [0] * 5
    writer.write(End(how="return"))
    found = read(tmp_path)
    assert found.foreign == ""
    records = found.traces[0].records
    assert [r.seq for r in records] == list(range(1, 8 * 200 + 2))
    for k in range(8):
        assert [r.unsynced[0] for r in records if isinstance(r, Zeroed) and r.step == k] == list(
            map(str, range(200))
        )


@contextmanager
def alarms(handle: Callable[[int, object], None]) -> Iterator[None]:
    """A signal that `handle` handles, 10,000 times a second."""
    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def test_a_trace_that_a_signal_handler_writes_too(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "rank0.jsonl", "secret")
    handled = 0

    def handle(number: int, frame: object) -> None:
        nonlocal handled
        handled += 1
        writer.write(Discarded())

    with alarms(handle):
        for _ in range(3000):
            writer.write(Start(torch="x" * 2000))
    found = read(tmp_path)
    assert (found.foreign, len(found.traces[0].of(Discarded))) == ("", handled)
    assert handled > 10


def test_a_record_that_cannot_be_written_leaves_no_gap(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "rank0.jsonl", "secret")
    with pytest.raises(TypeError):
        writer.write(Start(torch=object()))  # type: ignore[arg-type]
    writer.write(End(how="return"))
    assert read(tmp_path).completed


def test_a_progress_log_with_threads_and_a_signal_handler(hurried: None, tmp_path: Path) -> None:
    class Session:
        writer = Writer(tmp_path / "rank0.jsonl", "secret")
        frames = Frames(str(Path(__file__).parent))
        progress = StepProgress(Turns())

    progress = Progress(Session())  # type: ignore[arg-type]

    def event(name: str) -> None:
        if progress.listens:
            progress.log(name)

    def handle(number: int, frame: object) -> None:
        event(f"handler {number}")

    threads = [
        threading.Thread(target=lambda: [event("thread") for _ in range(500)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    with alarms(handle):
        for number in range(1000):
            event(f"main {number}")
    for thread in threads:
        thread.join()
    found = read(tmp_path)
    assert found.foreign == ""
    events = [e.op for e in found.progress[0] if not e.op.startswith("handler")]
    assert events == [f"main {number}" for number in range(1000)]


# -- paths of fully_shard
# ---------------------------------------------------------------------------------------------

IMPORT = "from torch.distributed.fsdp import fully_shard"
OTHER_PATHS = (
    "from torch.distributed._composable.fsdp import fully_shard",
    "from torch.distributed._composable.fsdp.fully_shard import fully_shard",
    "from torch.distributed.fsdp._fully_shard._fully_shard import fully_shard",
)


@cases(
    "words",
    "import torch.distributed._composable.fsdp.fully_shard\nfrom torch.distributed._composable.fsdp"
    " import fully_shard",
    *(pytest.param(words, marks=pytest.mark.full) for words in OTHER_PATHS),
)
def test_fully_shard_by_other_paths(launcher: Launcher, tmp_path: Path, words: str) -> None:
    answer = launch(launcher, tmp_path / "run", edited(tmp_path, (IMPORT, words)), steps=1)
    found = read_run(tmp_path / "run", "train", answer, 2, "train.py")
    assert found.completed
    assert [[len(trace.of(kind)) for kind in (Shard, Wrap)] for trace in found.traces] == [
        [3, 3],
        [3, 3],
    ]


def test_ddp_stands_in_for_fully_shard_by_an_old_path(launcher: Launcher, tmp_path: Path) -> None:
    script = edited(
        tmp_path, (IMPORT, "from torch.distributed._composable.fsdp.fully_shard import fully_shard")
    )
    answer = launch(launcher, tmp_path / "run", script, steps=1, mode="ddp")
    found = read_run(tmp_path / "run", "reference", answer, 2, "train.py")
    assert found.completed
    assert not any(entry.sharded for entries in found.parameters.values() for entry in entries)


# -- errors of the verifier itself
# ------------------------------------------------------------------------------------

RIGHT = steps()
ERROR = {"kind": "probe_error", "symbol": "on_call", "text": "AttributeError: no _renamed"}
ERROR["where"] = "verifier/probe/x.py:7"


def test_an_error_in_a_rule_is_ours(monkeypatch: Patch) -> None:
    def raises(evidence: Evidence) -> Finding:
        raise KeyError("renamed")

    monkeypatch.setitem(RULES, "broken", made_up_rule("broken", raises))
    broken, other = judge(Evidence(train=run(RIGHT, RIGHT)), ["broken", "run-completes"])
    assert (broken.rule, broken.status) == ("broken", "error")
    assert "KeyError: 'renamed'" in broken.evidence and "(verifier/judging/" in broken.evidence
    assert (other.rule, other.status) == ("run-completes", "pass")
    assert Verdict("error", {}, {}, (), (broken, other)).exit_code == OUR_FAULT == 3


def test_an_error_of_the_probe_is_ours_and_the_rules_are_judged() -> None:
    found = judge(Evidence(train=run([*RIGHT, ERROR], [*RIGHT, ERROR])), ["run-completes"])
    assert [(f.rule, f.status) for f in found] == [("run-completes", "pass"), ("verifier", "error")]
    assert "no _renamed in verifier/probe/x.py:7" in found[1].evidence
    assert "more" not in found[1].evidence  # the same on both ranks


@pytest.mark.parametrize("recorded", [[ERROR], []], ids=["recorded", "not recorded"])
def test_a_rank_that_the_verifier_ended_is_no_failure_of_the_script(
    recorded: list[dict[str, Any]],
) -> None:
    first = trace(0, tuple({"seq": k, "at": 0.0, **r} for k, r in enumerate([*RIGHT, *recorded])))
    victim = end("E", "Connection closed by peer", at=1.0)
    ended = (Ended(0, PROBE_FAILED, False), Ended(1, 1, False))
    train = Run(
        "train",
        2,
        (first, trace(1, (victim,))),
        ended,
        stderr={0: "Traceback\nAttributeError: no _renamed\n"},
    )
    found = judge(Evidence(train=train), ["run-completes", "matches-ddp", "optim-before-shard"])
    assert "fail" not in [f.status for f in found]
    assert [f.status for f in found if f.rule in ("run-completes", "verifier")] == [
        "error",
        "error",
    ]
    assert "no _renamed" in found[-1].evidence


def test_a_script_that_exits_with_the_same_code_is_to_blame() -> None:
    end = {
        "kind": "end",
        "how": "sys.exit",
        "code": PROBE_FAILED,
        "message": "",
        "frames": [],
        "at": 1.0,
    }
    train = Run("train", 1, (trace(0, (end,)),), (Ended(0, PROBE_FAILED, False),))
    assert [f.status for f in judge(Evidence(train=train), ["run-completes"])] == ["fail"]


def test_a_subscriber_that_fails(tmp_path: Path, monkeypatch: Patch) -> None:
    dispatcher = Dispatcher(ProbeErrors(Writer(tmp_path / "rank0.jsonl", "secret")).report)
    raised: list[BaseException] = []

    def fails(call: Call) -> None:
        raise raised[-1]

    dispatcher.around("colorsys:rgb_to_yiq", before=fails)
    monkeypatch.setattr(colorsys, "rgb_to_yiq", colorsys.rgb_to_yiq)
    dispatcher.install()

    def hook(error: BaseException) -> None:
        raised.append(error)
        assert colorsys.rgb_to_yiq(0.0, 0.0, 0.0) == (0.0, 0.0, 0.0)

    for error in (AttributeError("no _renamed"), AttributeError("no _renamed"), KeyError("other")):
        hook(error)
    with pytest.raises(StopRun):
        hook(StopRun())
    with pytest.raises(RuntimeError):  # asynchronous: perhaps the script's
        hook(RuntimeError("CUDA error: device-side assert triggered"))
    records = read(tmp_path).traces[0].records
    errors = [record for record in records if isinstance(record, ProbeError)]
    assert [error.text for error in errors] == ["AttributeError: no _renamed", "KeyError: 'other'"]
    assert all(error.symbol.endswith("fails") for error in errors)


BREAKS_A_HOOK = """def main():
    import sys
    sys.modules["verified_fsdp2.verifier.probe.events.calls"].row_hashes = None
"""


def test_a_hook_that_fails_in_a_rank(verify_script: Any, tmp_path: Path) -> None:
    script = edited(tmp_path, ("def main():\n", BREAKS_A_HOOK))
    made = verify_script(script, only=("run-completes", "root-not-wrapped", "optim-before-shard"))
    found = {f.rule: f.status for f in made.findings}
    assert found["run-completes"] == found["optim-before-shard"] == "pass"
    assert found["verifier"] == "error"
    assert (made.verdict, made.exit_code) == ("error", OUR_FAULT)


BREAKS_THE_START = """import sys, types
sys.modules["verified_fsdp2.verifier.probe.install"] = types.ModuleType("install")
import torch
"""


@pytest.mark.full
def test_a_probe_that_cannot_start_with_torchrun(verify_script: Any, tmp_path: Path) -> None:
    script = edited(tmp_path, ("import torch\nimport", f"{BREAKS_THE_START}import"))
    made = verify_script(script, only=("run-completes",), launcher="torchrun")
    assert {f.rule: f.status for f in made.findings} == {
        "run-completes": "error",
        "verifier": "error",
    }
    assert "'install'" in made.findings[-1].evidence and made.exit_code == OUR_FAULT


@pytest.mark.parametrize("name", sorted(RENDERERS))
def test_every_report_shows_an_error_of_ours(name: str) -> None:
    findings = judge(Evidence(train=run([*RIGHT, ERROR])), ["run-completes"])
    assert "no _renamed" in RENDERERS[name](verdict(*findings))


# -- torch that cannot be imported, and torch that the probe does not know
# ----------------------------------------------

RENAMED = """
import importlib.machinery, sys

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torch.testing._internal.distributed.fake_pg":
            return None
        sys.meta_path.remove(Finder)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def executed(module):
            execute(module)
            module.Renamed = module.__dict__.pop("FakeStore")

        spec.loader.exec_module = executed
        return spec

sys.meta_path.insert(0, Finder)
"""


def test_a_torch_that_cannot_be_imported_is_the_users(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "torch").mkdir()
    text = "raise OSError('libcudart.so.12: cannot open shared object file')\n"
    (tmp_path / "torch" / "__init__.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with (
        pytest.raises(UserError, match=r"libcudart\.so\.12: cannot open"),
        Launcher(log=tmp_path / "log"),
    ):
        pass


@pytest.mark.full
@pytest.mark.launch
def test_a_torch_that_the_probe_does_not_know_is_ours(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "sitecustomize.py").write_text(RENAMED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = {}
    with Launcher(log=tmp_path / "log") as launcher:
        for mode in ("simulate", "fsdp"):
            answer = launch(launcher, tmp_path / mode, ZOO / "minimal.py", steps=1, mode=mode)
            found[mode] = read_run(tmp_path / mode, mode, answer, 2, "train.py")
    assert "fake_pg.FakeStore" in found["simulate"].probe_failed
    assert found["fsdp"].completed and not found["fsdp"].probe_errors
