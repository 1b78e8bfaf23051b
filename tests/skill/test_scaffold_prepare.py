"""prepare.py as a process: killed, it leaves no worker and no lock, and the next start
continues.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from trees import write_project
from verified_fsdp2.verifier.isolation.proc import children

pytestmark = pytest.mark.launch
SPEC = """\
version: 1
model: {kind: decoder, layers: 1, width: 32, heads: 2, vocabulary: 256, sequence_length: 64}
data: {kind: jsonl, files: [notes.jsonl], packing: documents}
train: {steps: 20, global_batch: 8}
"""


def start(project: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "prepare.py", "--workers", "2"]
    return subprocess.Popen(
        command, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_a_killed_start_is_continued(tmp_path: Path) -> None:
    texts = [f"{number} {'x' * (number % 50)}" for number in range(2000)]
    (tmp_path / "notes.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    project = write_project(tmp_path, yaml.safe_load(SPEC))
    code = (project / "prepare.py").read_text()
    slow = code.replace("PART = 2**23", "PART = 2**9").replace(
        "    number, spans = job\n", "    number, spans = job\n    time.sleep(0.05)\n"
    )
    (project / "prepare.py").write_text(slow)
    killed = start(project)
    deadline = time.monotonic() + 60
    while len(list(project.glob("tokens/*/parts/*.npz"))) < 5:
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    workers = children(killed.pid)
    assert len(workers) == 2
    killed.kill()
    killed.communicate(timeout=10)
    kept = {path: path.stat().st_mtime_ns for path in project.glob("tokens/*/parts/*.npz")}
    again = start(project)  # it waits for the lock that the workers still have
    while len(now := list(project.glob("tokens/*/parts/*.npz"))) <= len(kept) + 5:
        assert again.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    assert {path: path.stat().st_mtime_ns for path in now if path in kept} == kept
    while any(
        Path(f"/proc/{pid}").exists() for pid in workers
    ):  # an orphan stays until the system has reaped it
        assert time.monotonic() < deadline
        time.sleep(0.02)
    again.send_signal(signal.SIGINT)
    shown, _ = again.communicate(timeout=20)
    assert (again.returncode, shown) == (1, "stopped: python prepare.py continues\n")
    (project / "prepare.py").write_text(code.replace("PART = 2**23", "PART = 2**9"))
    last = start(project)
    shown, _ = last.communicate(timeout=60)
    assert last.returncode == 0 and "2,000 documents" in shown
    (tokens,) = project.glob("tokens/*/tokens.bin")
    assert (
        np.fromfile(tokens, np.uint8).tobytes() == "".join(f"{text}\n" for text in texts).encode()
    )
