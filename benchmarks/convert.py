"""`fsdp2 convert` on every DDP and FSDP1 script of the evals and of the hosts: what passes
untouched, and what needs how many edits.

    python benchmarks/convert.py --out benchmarks/results/convert.json [--only NAME]

Each script is converted and verified; one that does not pass gets its `edits`, and is verified
again. The grader of the evals, which knows nothing of the verifier, judges the same file: `right`
says whether its checks of mathematics hold; `wishes` are checks of what a task asks for beyond a
conversion. The catalogues of constructs in tests/migrate are no training to verify: their
constructs are counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results_file import write

ROOT = Path(__file__).resolve().parents[1]
FSDP2 = [sys.executable, "-m", "verified_fsdp2.skill"]
PATIENCE = 900  # seconds of the grader, on a machine that others use
MATHEMATICS = (
    "runs",
    "sharded",
    "shares-batch",
    "same-start",
    "trajectory",
    "resumes",
    "tied",
    "buffers",
    "export",
)
TASK = ROOT / "evals" / "tasks"


@dataclass(frozen=True)
class Script:
    """A script, the options of `verify` and its own arguments."""

    name: str
    kind: str
    folder: Path
    file: str = "train.py"
    verify: str = "--steps 5"
    args: str = ""
    edits: tuple[tuple[str, str], ...] = ()

    @property
    def task(self) -> bool:
        """Whether the grader of the evals knows it."""
        return self.folder.is_relative_to(TASK)


SCRIPTS = (
    Script("ddp-accumulation", "ddp", TASK / "ddp-accumulation" / "start", args="--steps 8"),
    Script(
        "contrastive-towers",
        "ddp",
        TASK / "contrastive-towers" / "start",
        args="--steps 8",
        edits=(("nn.Parameter(torch.tensor(2.0))", "nn.Parameter(torch.tensor([2.0]))"),),
    ),
    Script(
        "converted",
        "ddp",
        ROOT / "tests" / "hosts" / "converted",
        file="before.py",
        args="--steps 8 --out {checkpoint}/m.pt",
    ),
    Script(
        "fsdp1-hybrid",
        "fsdp1",
        TASK / "fsdp1-hybrid" / "start",
        verify="--nproc 4 --steps 5 --single-args '--shard 1'",
        args="--steps 8 --shard 2",
    ),
    Script("fsdp1-export", "fsdp1", TASK / "fsdp1-export" / "start", args="--steps 8"),
    Script(
        "ddp-trainer",
        "ddp",
        TASK / "ddp-trainer" / "start",
        verify=(
            "--steps 5 --save-args 'checkpoint={checkpoint}/c.pt save_at=3' --resume-args"
            " 'resume={checkpoint}/c.pt'"
        ),
    ),
    Script(
        "ddp-sft",
        "ddp",
        TASK / "ddp-sft" / "start",
        verify=(
            "--steps 5 --save-args '--out {checkpoint}' --resume-args '--resume"
            " {checkpoint}/step_3'"
        ),
        args="--steps 6",
    ),
)
CATALOGUES = ("ddp_class", "ddp_functions", "fsdp1_trainer", "fsdp1_by_hand")


def one(script: Script, folder: Path) -> dict[str, Any]:
    """Convert, verify, edit and verify again, grade."""
    work = folder / script.name
    shutil.copytree(script.folder, work)
    if script.task:
        for path in (ROOT / "evals" / "shared").glob("*.py"):
            shutil.copy(path, work)
    row: dict[str, Any] = {"script": script.name, "kind": script.kind}
    begin = time.perf_counter()
    command = [*FSDP2, "convert", script.file, "-o", "new.py", "--no-verify", "--json"]
    made = json.loads(
        subprocess.run(command, cwd=work, capture_output=True, text=True, check=False).stdout
    )
    row |= {
        "converted": len(made["done"]),
        "todo": len(made["todo"]),
        "seconds": round(time.perf_counter() - begin, 1),
    }
    row["verdict"], row["failed_rules"] = verify(script, work)
    print(row, flush=True)
    row["untouched"] = row["verdict"] == "pass"
    row["edits"] = 0
    if not row["untouched"] and script.edits:
        text = (work / "new.py").read_text(encoding="utf-8")
        for old, new in script.edits:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (work / "new.py").write_text(text, encoding="utf-8")
        row["edits"] = len(script.edits)
        row["verdict_after_edits"], _ = verify(script, work)
    if script.task:
        row |= graded(script, work)
    return row


def verify(script: Script, work: Path) -> tuple[str, list[str]]:
    """(verdict, rules that failed) of the new script, as `fsdp2 convert` calls it."""
    report = work / "report.json"
    report.unlink(missing_ok=True)
    options = f"{script.verify} --report json={report}"
    words = [
        *FSDP2,
        "convert",
        script.file,
        "-o",
        "again.py",
        "--verify",
        options,
        "--",
        *script.args.split(),
    ]
    if (work / "again.py").exists():  # with edits: the file is the edited one
        words = [*FSDP2, "verify", "new.py", *shlex.split(options), "--", *script.args.split()]
        if script.kind == "ddp":
            words[4:4] = ["--reference", f"{script.file} {script.args}".strip()]
    done = subprocess.run(
        words,
        cwd=work,
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
        env=environment(),
    )
    if not report.is_file():
        return f"no report, exit {done.returncode}: {(done.stdout + done.stderr)[-300:]}", []
    data = json.loads(report.read_text(encoding="utf-8"))
    failed = [
        f["rule"]
        for f in data["findings"]
        if f["status"] in ("fail", "error") and not f["consequence"]
    ]
    return data["verdict"], sorted(failed)


def environment() -> dict[str, str]:
    """Without the directory of this process in front of what is imported."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def graded(script: Script, work: Path) -> dict[str, Any]:
    """What the grader of the evals says about the converted script."""
    solution = work.parent / f"{script.name}-graded"
    shutil.copytree(
        work,
        solution,
        ignore=shutil.ignore_patterns("new.py", "again.py", "report.json", "__pycache__"),
    )
    shutil.copy(work / "new.py", solution / script.file)
    patient = (
        f"import sys, grade; grade.SECONDS = grade.ONE_LAUNCH = {PATIENCE};"
        " sys.exit(grade.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", patient, script.name, str(solution)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT / "evals")
    if done.returncode == 3:
        return {"right": None, "wrong": [], "wishes": [], "not_graded": done.stderr.strip()}
    found = json.loads(done.stdout)
    failed = [one["name"] for one in found["checks"] if not one["passed"]]
    wrong = [name for name in failed if name.split(":")[0] in MATHEMATICS]
    return {
        "right": not wrong,
        "wrong": wrong,
        "wishes": [name for name in failed if name not in wrong],
    }


def catalogue(name: str, folder: Path) -> dict[str, Any]:
    """How many constructs of a catalogue are converted."""
    shutil.copy(ROOT / "tests" / "migrate" / f"{name}.py", folder)
    command = [*FSDP2, "convert", f"{name}.py", "-o", f"new_{name}.py", "--no-verify", "--json"]
    made = json.loads(
        subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout
    )
    return {
        "script": name,
        "kind": made["kind"],
        "converted": len(made["done"]),
        "todo": len(made["todo"]),
    }


def main() -> int:
    """Run all, write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "convert.json"
    )
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    import torch

    rows, counted = [], []
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="convert-") as folder:
        for script in SCRIPTS:
            if options.only in script.name:
                rows.append(one(script, Path(folder)))
                print(rows[-1], f"in {time.perf_counter() - begin:.0f} s", flush=True)
        counted = [catalogue(name, Path(folder)) for name in CATALOGUES if not options.only]
    if options.only:  # rows that were not run keep theirs
        old = json.loads(options.out.read_text(encoding="utf-8"))
        rows = [
            next((row for row in rows if row["script"] == one["script"]), one)
            for one in old["rows"]
        ]
        counted = old["catalogues"]
    results = {
        "torch": torch.__version__,
        "scripts": len(rows),
        "untouched": sum(row["untouched"] for row in rows),
        "passed_but_wrong": [
            row["script"] for row in rows if row["untouched"] and row.get("right") is False
        ],
        "rows": rows,
        "catalogues": counted,
    }
    write(options.out, results)
    return 1 if results["passed_but_wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
