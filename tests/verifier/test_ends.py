"""Runs that end badly: the right rank is named, with its line, in time, and nothing survives."""

from __future__ import annotations

import textwrap
import time
from pathlib import Path

import pytest

from records import cases
from verified_fsdp2.verifier.errors import UserError
from verified_fsdp2.verifier.launch import processes

pytestmark = pytest.mark.launch

TEMPLATE = """
import os, signal, subprocess, sys, time
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

def misbehave(rank):
    {fault}

def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(10):
        model(torch.full((2, 8), float(rank + step))).sum().backward()
        if step == 2 and rank == 1:
            misbehave(rank)
        optimizer.step()
        optimizer.zero_grad()

main()
"""


@cases(
    "fault, words",
    ("raise ValueError('bad sample')", ["rank 1 raised ValueError: bad sample in script.py:8 misbehave <- script.py:"]),
    ("sys.exit(7)", ["rank 1 called sys.exit(7)", "while the others went on"]),
    ("os._exit(0)", ["rank 1 called os._exit(0) in script.py:8 misbehave <- script.py:20 main"]),
    ("os._exit(3)", ["rank 1 called os._exit(3)"]),
    ("os.kill(os.getpid(), signal.SIGKILL)", ["rank 1 was ended by SIGKILL"]),
    ("os.kill(os.getpid(), signal.SIGSEGV)", ["rank 1 was ended by SIGSEGV", "misbehave"]),
)
def test_the_right_rank_is_named(verify_script, tmp_path: Path, fault: str, words: list[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(TEMPLATE.format(fault=fault))
    (finding,) = verify_script(script, only=("run-completes",), timeout=40).findings
    assert finding.status == "fail"
    for word in words:
        assert word in finding.evidence
    if "SIGKILL" not in fault:
        assert finding.location is not None
        assert finding.location.line == 8


def test_a_hang_shows_the_rank_that_the_others_wait_for(verify_script, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TEMPLATE.format(fault="time.sleep(600)"))
    started = time.monotonic()
    (finding,) = verify_script(script, only=("run-completes",), timeout=8).findings
    assert time.monotonic() - started < 25
    assert finding.status == "fail"
    assert "rank 1 was not in a collective" in finding.evidence
    assert "misbehave" in finding.evidence
    assert finding.location is not None
    assert finding.location.line == 8


def test_a_conditional_collective_is_a_hang_of_the_rank_that_skips_it(verify_script, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        TEMPLATE.format(fault="return").replace(
            "optimizer.step()", "rank == 0 and dist.barrier()\n        optimizer.step()"
        )
    )
    (finding,) = verify_script(script, only=("run-completes",), timeout=8).findings
    assert finding.status == "fail"


def test_no_process_survives(verify_script, tmp_path: Path, launcher) -> None:
    """Not even a child in a session of its own, started by a rank that ignores SIGTERM."""
    mark = f"{time.monotonic_ns() % 10**9}"
    fault = f"""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["sleep", "{mark}"], start_new_session=True)
    time.sleep(600)"""
    script = tmp_path / "script.py"
    script.write_text(TEMPLATE.format(fault=textwrap.dedent(fault).strip().replace("\n", "\n    ")))
    verify_script(script, only=("run-completes",), timeout=8)
    assert processes.descendants(launcher._process.pid) == []
    assert [p for p in Path("/proc").glob("[0-9]*/cmdline") if mark.encode() in _read(p)] == []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_script_without_training_is_inconclusive(verify_script, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('nothing to train')\n")
    verdict = verify_script(script)
    assert verdict.verdict == "inconclusive"
    assert "fail" not in {f.status for f in verdict.findings}
    inconclusive = {f.rule for f in verdict.findings if f.status == "inconclusive"}
    assert {"root-not-wrapped", "optim-before-shard", "matches-ddp", "resume-is-exact", "run-completes"} <= inconclusive


def test_a_worker_that_ends_is_not_the_rank(verify_script, tmp_path: Path) -> None:
    """Data-loader workers are forked from the rank and end with os._exit in the middle of the run."""
    fault = "list(torch.utils.data.DataLoader(range(4), num_workers=1))"
    script = tmp_path / "script.py"
    script.write_text(TEMPLATE.format(fault=fault))
    (finding,) = verify_script(script, only=("run-completes",), timeout=60).findings
    assert finding.status == "pass", finding.evidence


def test_a_usage_error_of_the_script_is_quoted(verify_script, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        'import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument("--steps", required=True)\nparser.parse_args()\n'
    )
    with pytest.raises(UserError) as error:
        verify_script(script, only=("run-completes",))
    assert "required: --steps" in str(error.value) and "after `--`" in str(error.value)
