"""However `fsdp2 verify` itself ends, no rank outlives it; and what a machine refuses is said to be
the machine's.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from records import Patch, cases
from scripts import Command, wait_until, written
from verified_fsdp2.verifier.isolation import proc
from verified_fsdp2.verifier.launch import processes
from verified_fsdp2.verifier.launch.client import Launcher

SCRIPT = """
import pathlib, time
import torch.distributed as dist
dist.init_process_group("gloo")
pathlib.Path("{mark}" + str(dist.get_rank())).write_text("")
time.sleep(600)
"""


@pytest.mark.launch
def test_no_rank_outlives_a_killed_command(tmp_path: Path) -> None:
    """After other signals: test_robustness.py."""
    script, mark = tmp_path / "script.py", tmp_path / "rank"
    script.write_text(SCRIPT.format(mark=mark))
    command = [
        "env",
        f"TMPDIR={tmp_path}",
        sys.executable,
        "-m",
        "verified_fsdp2.skill",
        "verify",
        script,
    ]
    command += ["--allow-writes", str(tmp_path)]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(60, lambda: all((tmp_path / name).exists() for name in ("rank0", "rank1")))
    tree = proc.descendants(running.pid)
    assert len(tree) >= 4  # launcher, store, two ranks
    running.kill()
    running.wait(timeout=20)
    wait_until(10, lambda: not any(processes.runs(pid) for pid in tree))


LAUNCHER = str(Path(processes.__file__).parents[1])


def test_a_launcher_that_nobody_waits_for_ends_before_it_imports_torch() -> None:
    command = [sys.executable, LAUNCHER, "cpu", "1"]
    gone = subprocess.run(command, input=b"", stdout=subprocess.PIPE, timeout=30, check=False)
    assert (gone.returncode, gone.stdout) == (1, b"")


def test_a_launcher_that_imports_torch_ends_with_its_parent(tmp_path: Path) -> None:
    """The parent is a process that only starts it and is killed at once."""
    code = (
        "import subprocess, sys; p = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE);"
        " print(p.pid, flush=True); p.wait()"
    )
    command = [sys.executable, "-c", code, sys.executable, LAUNCHER, "cpu", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        launcher = int(parent.stdout.readline())
        maps = Path(f"/proc/{launcher}/maps")
        wait_until(30, lambda: "torch" in maps.read_text())  # it is in the middle of the import
        os.kill(launcher, signal.SIGSTOP)  # so that it cannot come to its end by itself
        parent.kill()
    wait_until(5, lambda: not processes.runs(launcher))


HELD = {"mechanism": "guard", "reasons": {}, "holder": 0, "caches": []}
SOCKETS = [
    {"number": 1, "fault": "no sockets", "message": "Operation not permitted"},
    {"number": 2, "fault": "killed"},
]


@cases(
    "flags, answers, said",
    ([], [{"devices": 0, "isolation": HELD}, *SOCKETS], "sockets"),
    (
        ["--device", "cuda", "--nproc", "64"],
        [{"devices": 0}],
        "of the 64 CUDA devices that --device cuda needs",
    ),
)
def test_what_a_machine_refuses_is_no_fault_of_the_script(
    tmp_path: Path,
    monkeypatch: Patch,
    command: Command,
    flags: list[str],
    answers: list[Any],
    said: str,
) -> None:
    left = [*answers]
    monkeypatch.setattr(Launcher, "_read", lambda self, seconds: left.pop(0))
    script = written(tmp_path, "", "script.py")
    shown = command("verify", str(script), *flags, code=4)
    assert said in shown.err and "NO RANKS WERE JUDGED" in shown.out


def test_the_end_of_one_run_leaves_the_processes_of_another_alone() -> None:
    """The other run starts processes all the time, as between the ranks of a run; each ends by
    itself.
    """
    pid = os.fork()
    if pid == 0:
        processes.become(_end_one_of_two_runs, failed=1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _end_one_of_two_runs() -> int:
    other = os.fork()
    if other == 0:
        processes.become(_killed_of_many, failed=1)
    while processes.runs(other):
        processes.end_below(spare=[other])
    return os.waitstatus_to_exitcode(os.waitpid(other, 0)[1])


def _killed_of_many() -> int:
    killed = 0
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        pid = os.fork()
        if pid == 0:
            time.sleep(0.001)
            processes.leave(0)
        killed += os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    return int(killed > 0)
