"""Generated projects with data of their own, really run: workers, and bad data that no rank may
train on.
"""

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from test_scaffold_launch import SPEC, finish, run, shown_until, start, steps_of

from trees import write_project
from verified_fsdp2.verifier.isolation.proc import children

pytestmark = [pytest.mark.launch, pytest.mark.full]


def test_a_terminated_run_with_workers_saves_and_goes_on_with_more_ranks(tmp_path: Path) -> None:
    """A scheduler sends SIGTERM to all processes, workers first; they must outlive the
    checkpoint.
    """
    out = write_project(tmp_path, SPEC, "data.workers=2")
    stopped = start(out, 1, tmp_path / "parts", "--steps", "1000000")
    shown = shown_until(stopped, 2)
    workers = children(stopped.pid)
    assert len(workers) == 2
    for pid in (*workers, stopped.pid):
        os.kill(pid, signal.SIGTERM)
    shown += finish(stopped)
    assert "stopped by" in shown
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    steps = steps_of(tmp_path / "parts")[-1]["step"] + 2
    resumed = run(out, 2, tmp_path / "parts", steps, "--resume")
    assert [record["step"] for record in resumed] == list(range(1, steps + 1))
    code = (out / "data.py").read_text()
    (out / "data.py").write_text(code.replace("SAMPLES = 128", "SAMPLES = 160"))
    shown = finish(start(out, 1, tmp_path / "parts", "--resume"), status=2)
    assert re.search("122 .* 152", shown)


def test_bad_data_stop_all_ranks_before_one_trains(tmp_path: Path) -> None:
    np.arange(2000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    out = write_project(tmp_path, SPEC, "data={kind: tokens, files: [a.bin]}")
    shown = finish(start(out, 2, tmp_path / "out"), status=1)  # torchrun's; that of a rank is 2
    assert (
        len(
            re.findall(r"^error: .*a\.bin: token 64 is 64, not one of 64 ids$", shown, re.MULTILINE)
        )
        == 1
    )
    assert re.search(r"exitcode *: 2", shown)
    assert not list((tmp_path / "out").glob("run-*"))
