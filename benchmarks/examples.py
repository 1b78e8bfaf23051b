"""Every spec of examples/: generated, linted, trained and verified; and its losses on 1, 2 and 4
ranks.

    python benchmarks/examples.py --out benchmarks/results/examples.json
    python benchmarks/examples.py --out benchmarks/results/examples.json --missing  # without a row

The verdict is that of `fsdp2 verify`, which trains on the spec's ranks, on one rank, as DDP, and
resumes and reshards. `apart` is the largest relative difference of the losses of any two of its
runs on different numbers of ranks, `allowed` the tolerance that the verifier derived from a
perturbed run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import environment
from results_file import write
from verified_fsdp2.skill import scaffold, spec

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 1800  # seconds
QUIET = ("pass", "not_applicable", "not_covered")
COMPARED = ("train", "single", "reference", "resume", "reshard")


def specs() -> list[Path]:
    """One file each, or a folder with a spec.yaml, the model's module and a script that draws the
    data.
    """
    return sorted([*(ROOT / "examples").glob("*.yaml"), *(ROOT / "examples").glob("*/spec.yaml")])


def with_data(path: Path, folder: Path) -> Path:
    """The spec; one that has a folder of its own is copied, and its data are made there."""
    if path.parent.name == "examples":
        return path
    copied = folder / f"{path.parent.name}-files"
    shutil.copytree(path.parent, copied)
    subprocess.run(
        [sys.executable, "draw.py", "images"], cwd=copied, check=True, stdout=subprocess.DEVNULL
    )
    return copied / path.name


def row(path: Path, folder: Path) -> dict[str, Any]:
    """What one spec gives; modules beside it are put beside train.py, as its README says."""
    loaded = spec.load(path)
    name = loaded["name"]
    project = folder / name
    scaffold.write(scaffold.render(loaded), project)
    own = [f"{module}.py" for module in loaded.own_modules]
    for file in own:
        shutil.copy(path.with_name(file), project)
    ruff = [sys.executable, "-m", "ruff"]
    options = [
        "--isolated",
        "--no-cache",
        *(word for file in own for word in ("--exclude", file)),
        ".",
    ]
    linted = all(
        subprocess.run([*ruff, *words, *options], cwd=project, check=False).returncode == 0
        for words in (["check", "-q"], ["format", "-q", "--check"])
    )
    if (project / "prepare.py").exists():
        subprocess.run(
            [sys.executable, "prepare.py"], cwd=project, check=True, stdout=subprocess.DEVNULL
        )
    report = folder / f"{loaded['name']}.json"
    started = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "verified_fsdp2.skill",
        "verify",
        project,
        "--report",
        f"json={report}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    seconds = time.monotonic() - started
    if not report.exists():
        raise SystemExit(f"{path.name}: exit {done.returncode}\n{done.stderr[-3000:]}")
    verdict = json.loads(report.read_text(encoding="utf-8"))
    return {
        "spec": name,
        "ranks": sorted({run["world_size"] for run in verdict["runs"]}),
        "linted": linted,
        "verdict": verdict["verdict"],
        "findings": [f["rule"] for f in verdict["findings"] if f["status"] not in QUIET],
        "not_covered": [f["rule"] for f in verdict["findings"] if f["status"] == "not_covered"],
        "apart": apart(verdict["runs"]),
        "seconds": round(seconds, 1),
    }


def apart(runs: list[dict[str, Any]]) -> float:
    """The largest relative difference of the losses of a step, over all runs that should agree."""
    found: dict[int, list[float]] = {}
    for run in runs:
        if run["role"] in COMPARED:
            last = max((len(r["losses"]) for r in runs), default=0)
            for number, loss in enumerate(run["losses"], start=last - len(run["losses"])):
                found.setdefault(number, []).append(loss)
    return max((max(losses) / min(losses) - 1.0 for losses in found.values()), default=0.0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--only", default="", help="specs whose name contains this")
    parser.add_argument(
        "--missing",
        action="store_true",
        help="keep the rows of the file and add those that it lacks",
    )
    options = parser.parse_args()
    if options.missing and not options.out:
        parser.error("--missing needs --out, the file whose rows stay")
    rows: list[dict[str, Any]] = (
        json.loads(options.out.read_text(encoding="utf-8"))["rows"] if options.missing else []
    )
    there = {row["spec"] for row in rows}
    print(f"{'spec':<24}{'ranks':<12}{'lint':<6}{'verdict':<14}{'apart':<10}seconds")
    with tempfile.TemporaryDirectory(prefix="fsdp2-examples-") as folder:
        for path in specs():
            name = path.parent.name if path.name == "spec.yaml" else path.stem
            if options.only in str(path.relative_to(ROOT / "examples")) and name not in there:
                rows.append(found := row(with_data(path, Path(folder)), Path(folder)))
                ranks = ",".join(map(str, found["ranks"]))
                reported = (
                    f"{found['verdict']:<14}{found['apart']:<10.1e}{found['seconds']:>7} "
                    f" {' '.join(found['findings'])}"
                )
                linted = "ok" if found["linted"] else "BAD"
                print(f"{found['spec']:<24}{ranks:<12}{linted:<6}{reported}", flush=True)
                if options.missing:
                    write(
                        options.out,
                        {
                            "environment": environment(),
                            "rows": sorted(rows, key=lambda row: row["spec"]),
                        },
                    )
    if options.out:
        write(
            options.out,
            {"environment": environment(), "rows": sorted(rows, key=lambda row: row["spec"])},
        )
    return 0 if all(r["verdict"] == "pass" and r["linted"] for r in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
