"""Which lines and which sides of conditional expressions a rank is seen to reach."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import verified_fsdp2

SCRIPT = """def first(small, rank, accum, loss):
    y = 1 if small else 1 + rank
    z = small and rank or 5
    if 0 < rank < accum < loss:
        pass
    w = (loss if accum == 1
         else loss * accum)
    f = (lambda v: -v) if rank else None
    try:
        return 1 if small else 2
    finally:
        z = z or w

def late(steps):
    total = 0
    for step in range(steps):
        total += step if step < 150 else 2 * step
    return total
"""

WATCH = """
import sys
sys.path.insert(0, sys.argv[1])
from verified_fsdp2.verifier.probe.frames import Frames
from verified_fsdp2.verifier.probe.line_coverage import Lines
import train
text = open(train.__file__).read().splitlines()
lines = Lines(Frames(sys.argv[1]))
def reported():
    new = lines.sides.new()
    return [text[a - 1][b:d] for spans in new.values() for a, b, c, d in spans if a == c]
lines.start()
{calls}
"""


def seen(folder: Path, python: str, calls: str) -> list[list[str]]:
    """What is printed by `calls` in a process of its own, in which the script is watched."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "watch.py").write_text(WATCH.replace("{calls}", calls))
    # installed from a checkout, its folder need not have the package's name
    (folder / "packages").mkdir()
    (folder / "packages" / "verified_fsdp2").symlink_to(Path(verified_fsdp2.__file__).parent)
    environment = {**os.environ, "PYTHONPATH": str(folder / "packages")}
    answer = subprocess.run(
        [python, "watch.py", str(folder)], cwd=folder, env=environment, capture_output=True
    )
    assert answer.returncode == 0, answer.stderr.decode()
    return [eval(line) for line in answer.stdout.decode().splitlines()]


def pythons() -> list[str]:
    """This Python, and others that are installed beside it by pyenv: the probe imports no torch."""
    versions = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    found = [versions / name / "bin" / "python" for name in ("3.12.1", "3.13.0")]
    return [sys.executable, *(str(path) for path in found if path.is_file())]


@pytest.mark.parametrize("python", pythons())
def test_sides_that_were_evaluated(tmp_path: Path, python: str) -> None:
    calls = "train.first(True, 1, 1, 3.0); print(reported())\n"
    calls += "train.first(False, 0, 2, 3.0); print(reported())\n"
    one, other = seen(tmp_path, python, calls)
    assert {"small", "rank", "accum", "loss", "accum == 1", "lambda v: -v"} <= {*one}
    missing = {"1 + rank", "5", "loss * accum", "None", "2", "w"}
    assert not missing & {*one}
    assert missing - {"w"} <= {*other} and "accum" not in other, "a chain ends where it is false"


@pytest.mark.parametrize("python", pythons())
def test_a_side_is_reported_once_and_again_when_the_training_begins(
    tmp_path: Path, python: str
) -> None:
    calls = "train.late(100); print(reported()); train.late(100); print(reported())\n"
    calls += (
        "lines.again(); train.late(100); print(reported()); train.late(200); print(reported())\n"
    )
    first, still, again, late = seen(tmp_path, python, calls)
    assert {*first} == {*again} == {"step", "step < 150"}
    assert still == [] and late == ["2 * step"]


def test_sides_of_lines_that_are_asked_for(tmp_path: Path) -> None:
    calls = "lines = Lines(Frames(sys.argv[1]), {train.__file__: [8]}); lines.start()\n"
    calls += "train.first(True, 1, 1, 3.0); print(reported())\n"
    assert {*seen(tmp_path, sys.executable, calls)[0]} == {"lambda v: -v", "rank"}
