"""Is the memory of a capacity run that of real tensors?

The same scripts with CUDA on the CPU, where every allocation is counted.

`python benchmarks/plan/real.py [NAME...]` tries the scripts of real.yaml as rank 0, runs them
on as many ranks on real tensors, and compares the peak of each phase, and each kind of memory that
is at least 1 % of it. benchmarks/results/plan_real.json has the newest of each.

Real tensors here are computed with the CPU's kernels of attention, RMS norm and dropout, so they
are compared with a capacity run that has these too. `gpu` is the difference that CUDA's kernels
make to the highest peak, in the capacity run that `fsdp2 plan` makes.
"""

import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

sys.path.append(str(Path(__file__).parents[1]))  # for for_gpus and results_file

from for_gpus import for_gpus

from capacity_runs import RunForCapacity, Seen, capacity_runs_of
from results_file import write
from verified_fsdp2.skill import scaffold
from verified_fsdp2.skill.spec import load
from verified_fsdp2.verifier.config.target import resolve

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "plan_real.json"
STEPS, LEAST, ALLOWED = 3, 0.01, 0.02
# On real tensors, until the peak is that of the plan: threads of gloo keep the buffer of a
# collective now and then, so the least counts.
RUNS = 3
Row = dict[str, Any]


def script_of(case: Row, folder: Path) -> tuple[Path, list[str], Path]:
    """The script of a case, its arguments, and where it runs."""
    if "spec" in case:
        source = (
            shutil.copytree((ROOT / "examples" / case["spec"]).parent, folder / "examples")
            / Path(case["spec"]).name
        )
        if "before" in case:
            subprocess.run(
                [sys.executable, *shlex.split(case["before"])], cwd=source.parent, check=True
            )
        spec = load(source, case.get("set", []), offline=True)
        scaffold.write(scaffold.render(spec), folder / "project", False)
        if "beside" in case:
            shutil.copy(source.parent / case["beside"], folder / "project")
        target = resolve(folder / "project", {})
        if target.prepare:
            subprocess.run(
                [sys.executable, *target.prepare], cwd=target.cwd, timeout=120, check=True
            )
        return target.script, ["--out", "{checkpoint}", *target.args], target.cwd
    if "zoo" in case:
        path = folder / f"{case['zoo']}.py"
        path.write_text(
            for_gpus((ROOT / "tests" / "zoo" / path.name).read_text(encoding="utf-8")),
            encoding="utf-8",
        )
    else:
        path = ROOT / case["script"]
    return path, shlex.split(case.get("args", "")), folder


def compared(planned: Seen, real: Seen) -> Row:
    """Planned against real: (ours - theirs) / theirs of the worst phase, and of the worst kind."""
    if planned.record is None or real.record is None or planned.errors or real.errors:
        return {
            "errors": (
                [*planned.errors, *(f"real: {error}" for error in real.errors)] or ["no record"]
            )
        }
    ours, theirs = (
        {peak.phase: peak for peak in seen.record.peaks} for seen in (planned, real) if seen.record
    )
    peaks = {
        phase: ours[phase].bytes / peak.bytes - 1 for phase, peak in theirs.items() if phase in ours
    }
    kinds = {
        f"{kind}, {phase}": ours[phase].kinds.get(kind, 0) / size - 1
        for phase, peak in theirs.items()
        if phase in ours
        for kind, size in peak.kinds.items()
        if size >= LEAST * peak.bytes
    }
    top = max(theirs.values(), key=lambda peak: peak.bytes)
    worst, worst_kind = (max(found, key=lambda name: abs(found[name])) for found in (peaks, kinds))
    return {
        "mib": round(top.bytes / (1 << 20), 3),
        "peak": round(peaks[worst], 4),
        "at": worst,
        "kind": round(kinds[worst_kind], 4),
        "of": worst_kind,
    }


def measured(case: Row, run_for_capacity: RunForCapacity) -> Row:
    with tempfile.TemporaryDirectory() as name:
        script, arguments, cwd = script_of(case, Path(name))
        ranks = case.get("ranks", 2)
        planned, as_cpu = (
            run_for_capacity(script, arguments, ranks, mode, cwd)
            for mode in ("capacity", "capacity_as_cpu")
        )
        runs: list[Seen] = []
        while len(runs) < RUNS and highest(as_cpu) not in map(highest, runs):
            runs.append(run_for_capacity(script, arguments, ranks, "count", cwd))
    real = min(runs, key=highest)
    row = {"name": case["name"], "what": case["what"], "ranks": ranks, **compared(as_cpu, real)}
    return (
        row if "errors" in row else {**row, "gpu": round(highest(planned) / highest(as_cpu) - 1, 4)}
    )


def highest(seen: Seen) -> int:
    return max(peak.bytes for peak in seen.record.peaks) if seen.record else 0


def main() -> None:
    cases = yaml.safe_load((ROOT / "benchmarks" / "plan" / "real.yaml").read_text())["cases"]
    kept = (
        {row["name"]: row for row in json.loads(RESULT.read_text())["rows"]}
        if RESULT.is_file()
        else {}
    )
    names = sys.argv[1:] or [case["name"] for case in cases]
    with capacity_runs_of(STEPS) as run_for_capacity:
        for case in (case for case in cases if case["name"] in names):
            row = kept[case["name"]] = measured(case, run_for_capacity)
            print(" ".join(str(value) for value in row.values()), flush=True)
            rows = [kept[one["name"]] for one in cases if one["name"] in kept]
            good = [one for one in rows if "errors" not in one]
            summary = {
                "scripts": len(rows),
                "peak_within": sum(abs(one["peak"]) <= ALLOWED for one in good),
                "kinds_within": sum(abs(one["kind"]) <= ALLOWED for one in good),
                "allowed": ALLOWED,
            }
            write(RESULT, {"summary": summary, "rows": rows})
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
