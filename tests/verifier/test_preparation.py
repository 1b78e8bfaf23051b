"""The script that is run once before all runs: bounded in time, and its output is the error."""

import sys
import textwrap
import time
from pathlib import Path

import pytest

from scripts import written
from verified_fsdp2.verifier.config.target import Target, resolve
from verified_fsdp2.verifier.errors import UserError
from verified_fsdp2.verifier.isolation.worlds import Worlds
from verified_fsdp2.verifier.launch.client import Launcher
from verified_fsdp2.verifier.launch.preparation import prepare
from verified_fsdp2.verifier.launch.processes import runs


def target(folder: Path, code: str, timeout: float = 60, words: str = "make.py --small") -> Target:
    written(folder, "print(1)\n", "train.py")
    written(folder, code, "make.py")
    written(folder, f"script: train.py\nprepare: {words}\ntimeout: {timeout}\n", "verify.yaml")
    return resolve(folder, {})


def run(found: Target, work: Path, launcher: Launcher) -> Worlds:
    """The worlds in which it has run."""
    files = Worlds(work, found.folders, found.cwd, launcher.choice)
    prepare(launcher, files, [sys.executable, *found.prepare], found.timeout)
    return files


def test_it_runs_in_the_folder_of_the_project_with_its_arguments(
    launcher: Launcher, tmp_path: Path
) -> None:
    found = target(tmp_path, "import sys\nopen('made', 'w').write(sys.argv[1])\n")
    files = run(found, tmp_path / "work", launcher)
    assert not (tmp_path / "made").exists()
    (made,) = (tmp_path / "work").rglob("made")
    assert made.read_text() == "--small" and str(files.begin(tmp_path / "later", "scratch").bases)
    assert resolve(tmp_path, {"prepare": "train.py"}).prepare == (str(tmp_path / "train.py"),)


def test_its_whole_output_is_the_error(launcher: Launcher, tmp_path: Path) -> None:
    found = target(tmp_path, "import sys\nprint('first line')\nsys.exit('a.jsonl:7 has no text')\n")
    with pytest.raises(UserError) as caught:
        run(found, tmp_path / "work", launcher)
    assert str(caught.value).splitlines()[1:] == ["first line", "a.jsonl:7 has no text"]
    assert str(caught.value).splitlines()[0].endswith("make.py --small ended with status 1")


def test_it_and_its_workers_end_when_it_takes_too_long(launcher: Launcher, tmp_path: Path) -> None:
    code = """
        import os, subprocess, sys, time
        below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(os.getpid(), below.pid, flush=True)
        time.sleep(600)
    """
    found = target(tmp_path, textwrap.dedent(code), timeout=5)
    begun = time.monotonic()
    with pytest.raises(UserError, match="took longer than 5 s") as caught:
        run(found, tmp_path / "work", launcher)
    assert time.monotonic() - begun < 60
    pids = [int(word) for word in str(caught.value).splitlines()[1].split()]
    assert len(pids) == 2 and not any(runs(pid) for pid in pids)


def test_a_script_that_is_not_there_is_named_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"prepare: .*other\.py: no such file"):
        target(tmp_path, "", words="other.py")
