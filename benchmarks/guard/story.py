"""A run of the scaffold below the guard: killed twice, resumed on other numbers of ranks, one bit
flipped.

    python benchmarks/guard/story.py OUT      # OUT: the project, its runs, guard.html

4 ranks (two replicas of two shards) are killed in their step 70, 2 ranks go on and are killed 50
steps later, 8 ranks make the rest; there one bit of one weight is flipped on rank 1.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SETTINGS = (
    "operation.guard=true",
    "parallel.dp_replicate=2",
    "train.steps=220",
    "checkpoint.interval=20",
    "train.micro_batch=2",
    "train.log_interval=20",
)
LAUNCHES = ((4, 70, ""), (2, 50, ""), (8, None, "31:1"))  # ranks, steps until the kill, a flip


def fsdp2(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "verified_fsdp2.skill", *words]
    print("$ fsdp2", *words, flush=True)
    return subprocess.run(command, check=False, text=True)


def launch(project: Path, number: int, ranks: int, kill: int | None, flip: str) -> None:
    command = [str(Path(sys.executable).with_name("torchrun")), "--standalone"]
    command += ["--nproc-per-node", str(ranks), "train.py", "--out", "runs"]
    command += ["--resume"] if number else []
    beside = str(HERE / "one_flip")
    words = f"every=10 out={project / 'guard.jsonl'}"
    variables = os.environ | {"OMP_NUM_THREADS": "1", "FSDP2_GUARD": words, "FLIP": flip}
    variables["PYTHONPATH"] = os.pathsep.join(
        [beside, *filter(None, [os.environ.get("PYTHONPATH", "")])]
    )
    print(f"$ torchrun on {ranks} ranks {'(resumes)' if number else ''}", flush=True)
    process = subprocess.Popen(command, cwd=project, env=variables, start_new_session=True)
    if kill is not None:
        at = steps(project) + kill
        while steps(project) < at and process.poll() is None:
            time.sleep(0.1)
        print(f"SIGKILL at about step {steps(project)}", flush=True)
        kill_all(process)
    process.wait()


def steps(project: Path) -> int:
    """The steps that the guard has checked last."""
    journal = project / "guard.jsonl"
    lines = journal.read_text().splitlines() if journal.exists() else []
    found = [line for line in lines if '"kind": "check"' in line]
    return int(found[-1].partition('"step": ')[2].partition(",")[0]) if found else 0


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """The ranks have sessions of their own: those whose parent is torchrun."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if parent == process.pid:
            os.kill(int(folder.name), signal.SIGKILL)
    os.killpg(process.pid, signal.SIGKILL)


def main() -> int:
    project = Path(sys.argv[1]).resolve() / "project"
    spec = HERE.parents[1] / "examples" / "quickstart.yaml"
    fsdp2("new", str(spec), str(project), *(word for one in SETTINGS for word in ("--set", one)))
    for number, (ranks, kill, flip) in enumerate(LAUNCHES):
        launch(project, number, ranks, kill, flip)
    page = project.parent / "guard.html"
    return fsdp2("guard", "report", str(project / "guard.jsonl"), "--html", str(page)).returncode


if __name__ == "__main__":
    raise SystemExit(main())
