"""Streams that are closed or not read, a terminal that goes, modules with names of Python's."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from records import cases
from scripts import FAULTS, ZOO, python

MODULE = ("-m", "verified_fsdp2.skill")
FAULTY, RIGHT = FAULTS / "optim_before_shard.py", ZOO / "minimal.py"


def shell(line: str, *words: object) -> int:
    """The exit code of a command of ours, `"$@"`, in a line of sh; nothing is a traceback."""
    done = subprocess.run(
        ["bash", "-c", line, "bash", sys.executable, *MODULE, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stdout + done.stderr
    return done.returncode


@cases(
    "line",
    '"$@" 2>&-',
    '"$@" >&-',
    '"$@" <&- >&- 2>&-',
    '"$@" | true; exit ${PIPESTATUS[0]}',
    '"$@" 2>&1 | true; exit ${PIPESTATUS[0]}',
)
def test_the_exit_code_is_that_of_the_verdict(line: str) -> None:
    static = ("verify", "--tier", "static")
    assert shell(line, *static, FAULTY) == 1
    assert shell(line, *static, RIGHT) == 4
    assert shell(line, "lint", RIGHT) == 0
    assert shell(line, "explain") == 0
    assert shell(line, "--help") == 0
    assert shell(line, "lint", "none.py") == 2


def test_a_report_is_written_where_nobody_reads_the_output(tmp_path: Path) -> None:
    words = ("--report", "text", "--report", f"json={tmp_path / 'out.json'}")
    assert shell('"$@" | true; exit ${PIPESTATUS[0]}', "lint", FAULTY, *words) == 1
    assert (tmp_path / "out.json").exists()


SHADOWED = (
    "ast",
    "argparse",
    "dataclasses",
    "json",
    "jsonschema",
    "pathlib",
    "re",
    "signal",
    "textwrap",
    "typing",
    "yaml",
)


def test_modules_of_the_working_folder_are_not_imported(tmp_path: Path) -> None:
    for name in SHADOWED:
        (tmp_path / f"{name}.py").write_text("raise SystemExit(0)\n")
    python(*MODULE, "lint", FAULTY, status=1, cwd=tmp_path)
    python(*MODULE, "spec", "check", "none.yaml", status=2, cwd=tmp_path)
    python("-P", *MODULE, "lint", FAULTY, status=1, cwd=tmp_path)
    folder = Path(__file__).parents[1] / "skill"
    python(folder, "lint", FAULTY, status=1, cwd=tmp_path)


@pytest.mark.launch
def test_the_script_still_has_the_folder_that_it_lies_in(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("VALUE = 1\n")
    (tmp_path / "train.py").write_text(f"import own\n{RIGHT.read_text()}")
    words = ("verify", "train.py", "--only", "run-completes", "--steps", "3")
    python(*MODULE, *words, cwd=tmp_path)
    python(*MODULE, "verify", "-m", "train", *words[2:], cwd=tmp_path)


def reading(hangup: signal.Handlers = signal.SIG_DFL, **more: Any) -> subprocess.Popen[bytes]:
    """A command that has begun to read its input and waits for the rest."""
    running = subprocess.Popen(
        [sys.executable, *MODULE, "lint", "/dev/stdin"],
        **{
            "stdin": subprocess.PIPE,
            "preexec_fn": lambda: signal.signal(signal.SIGHUP, hangup),
            **more,
        },
    )
    assert running.stdin is not None
    running.stdin.write(b"#" * 500_000 + b"\n")  # more than a pipe holds
    running.stdin.flush()
    return running


@cases("number", signal.SIGHUP, signal.SIGTERM)
def test_a_signal_ends_it_in_order(number: signal.Signals) -> None:
    running = reading(stderr=subprocess.PIPE)
    running.send_signal(number)
    _, error = running.communicate(timeout=20)
    assert (running.returncode, error) == (128 + number, b"interrupted\n")


def test_a_signal_that_is_ignored_stays_so() -> None:
    running = reading(hangup=signal.SIG_IGN, stdout=subprocess.DEVNULL)
    running.send_signal(signal.SIGHUP)
    running.communicate(FAULTY.read_bytes(), timeout=20)
    assert running.returncode == 1


def test_a_terminal_that_goes_away() -> None:
    """The kernel sends SIGHUP, and nothing can be written to it any more."""
    ours, theirs = os.openpty()
    running = reading(stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    os.close(ours)
    running.send_signal(signal.SIGHUP)
    running.communicate(timeout=20)
    assert running.returncode == 129
