"""Scripts that behave badly: the right rank is named, in time, with bounded output, and nothing is
left running.
"""

import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import awkward
import pytest

from records import cases
from scripts import wait_until
from verified_fsdp2.verifier.config.target import resolve
from verified_fsdp2.verifier.launch import processes
from verified_fsdp2.verifier.launch.capture import HEAD, TAIL, Capture
from verified_fsdp2.verifier.launch.client import Launcher
from verified_fsdp2.verifier.pipeline import select, verify_with

BOTH_LAUNCHERS = ("children", "sys_exit_7", "os_exit_0", "sigkill")
# each like another one
ONCE_IS_ENOUGH = (
    "ignores_sigterm",
    "needs_3_ranks",
    "sigsegv",
    "loader_worker_ends",
    "kills_its_group",
)


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Launcher, str]]:
    """A launcher whose processes can all be found by a mark in their environment, and the mark."""
    mark = uuid.uuid4().hex
    os.environ[awkward.MARK] = mark
    try:
        with Launcher(log=tmp_path_factory.mktemp("launcher") / "log") as running:
            yield running, mark
    finally:
        del os.environ[awkward.MARK]
    assert list(awkward.marked(mark)) == []


@pytest.mark.launch
@cases(
    "case",
    *(
        pytest.param(c, marks=pytest.mark.full) if c.name in ONCE_IS_ENOUGH else c
        for c in awkward.ACTS
    ),
    ids=[case.name for case in awkward.ACTS],
)
def test_awkward_script(
    marked: tuple[Launcher, str], tmp_path: Path, case: awkward.Awkward
) -> None:
    hangs = "rank 1 was not in a collective" in case.says
    _judge(marked, tmp_path, case, launcher="fork", timeout=6 if hangs else 20)


@pytest.mark.full
@pytest.mark.launch
@cases(
    "case",
    *[case for case in awkward.ACTS if case.name in BOTH_LAUNCHERS],
    ids=lambda case: case.name,
)
def test_awkward_script_under_torchrun(
    marked: tuple[Launcher, str], tmp_path: Path, case: awkward.Awkward
) -> None:
    _judge(marked, tmp_path, case, launcher="torchrun", timeout=240)


def _judge(
    marked: tuple[Launcher, str],
    tmp_path: Path,
    case: awkward.Awkward,
    launcher: str,
    timeout: float,
) -> None:
    running, mark = marked
    target = resolve(
        case.write(tmp_path), {"nproc": case.nproc, "timeout": timeout, "launcher": launcher}
    )
    started = time.monotonic()
    (finding,) = verify_with(
        running, target, tmp_path / "work", select(("run-completes",), ())
    ).findings
    assert time.monotonic() - started < timeout + 17
    assert finding.status == case.verdict, finding.evidence
    for words in case.says:
        assert words in finding.evidence
    if case.at_line:
        assert finding.location is not None
        assert finding.location.line == awkward.ACT_LINE
    wait_until(5, lambda: len(list(awkward.marked(mark))) <= 1)  # the launcher itself
    assert sum(
        file.stat().st_size for file in (tmp_path / "work").rglob("*") if file.is_file()
    ) < 8 * (HEAD + TAIL)


@pytest.mark.launch
@cases(
    "name",
    *(pytest.param(n, marks=pytest.mark.full) if n == "empty" else n for n in awkward.NO_TARGETS),
)
def test_what_is_no_training_script(tmp_path: Path, name: str) -> None:
    content, code, words = awkward.NO_TARGETS[name]
    script = tmp_path / "script.py"
    if content is not None:
        script.write_bytes(content)
    row = awkward.verify(name, script, [], tmp_path)
    assert (row.exit, row.left) == (code, ())
    assert words in row.text


def test_a_folder_without_a_script(tmp_path: Path) -> None:
    row = awkward.verify("no_train_py", tmp_path, [], tmp_path)
    assert (row.exit, row.left) == (2, ())
    assert "train.py: no such file" in row.text


@pytest.mark.full
@pytest.mark.launch
@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "-rn", "true"], check=False).returncode != 0,
    reason="this machine makes no network namespace",
)
def test_without_a_loopback_the_machine_refuses(tmp_path: Path) -> None:
    row = awkward.verify(
        "no_loopback", awkward.ACTS[0].write(tmp_path), [], tmp_path, ("unshare", "-rn")
    )
    assert (row.exit, row.left) == (4, ())
    assert "sockets" in row.text


def test_a_capture_keeps_both_ends(tmp_path: Path) -> None:
    capture = Capture(tmp_path / "out")
    if (pid := os.fork()) == 0:
        for number in range(200_000):
            os.write(capture.writer, b"%09d\n" % number)
        processes.leave(0)
    capture.let_go()
    while capture.read():
        pass
    os.waitpid(pid, 0)
    capture.close()
    text = (tmp_path / "out").read_bytes()
    assert text.startswith(b"000000000\n000000001\n")
    assert text.endswith(b"000199998\n000199999\n")
    assert b"bytes left out) ..." in text
    assert HEAD + TAIL < len(text) < HEAD + 2 * TAIL
