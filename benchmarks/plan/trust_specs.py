"""Memory of generated projects with context and expert parallelism in a plan beside
figures that others measured on GPUs and published.

`python benchmarks/plan/trust_specs.py [NAME...]` plans the cases of published_specs.yaml, prints
them and writes benchmarks/results/plan_specs.json, which has the newest of each. No figure of a
case is used to compute a prediction.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from capacity_runs import GIB, RunForCapacity, capacity_runs_of
from results_file import write
from verified_fsdp2.skill import scaffold
from verified_fsdp2.skill.spec import load

HERE = Path(__file__).parent
RESULT = HERE.parent / "results" / "plan_specs.json"
SPEC = """\
version: 1
model: {kind: decoder, preset: 8b}
data: {kind: synthetic}
train: {steps: 100, global_batch: 8, dry_run: false}
verify: {reshard_to: [1]}
"""
STEPS = 2
Row = dict[str, Any]


def planned(case: Row, run_for_capacity: RunForCapacity) -> Row:
    """GiB of the highest peak, and predicted / reported."""
    with tempfile.TemporaryDirectory() as name:
        path, project = Path(name) / "spec.yaml", Path(name) / "project"
        path.write_text(SPEC, encoding="utf-8")
        scaffold.write(scaffold.render(load(path, case["set"], offline=True)), project, False)
        arguments = ["--out", "{checkpoint}"]
        seen = run_for_capacity(project / "train.py", arguments, case["nproc"], "capacity", project)
    if seen.record is None or seen.errors or seen.record.steps < STEPS:
        return {"name": case["name"], "errors": list(seen.errors) or ["no whole step"]}
    top = max(seen.record.peaks, key=lambda peak: peak.bytes)
    taken = "expandable" if case.get("allocator") == "expandable" else "reserved"
    predicted = max(max(getattr(peak, taken), peak.bytes) for peak in seen.record.peaks) / GIB
    kinds = {kind: round(size / GIB, 2) for kind, size in top.kinds.items() if size > GIB // 100}
    return {
        "name": case["name"],
        "reported": case["gib"],
        "predicted": round(predicted, 2),
        "ratio": round(predicted / case["gib"], 3),
        "tensors": round(top.bytes / GIB, 2),
        "kinds": kinds,
        "seconds": round(seen.seconds, 1),
    }


def summary(rows: list[Row]) -> Row:
    """The errors of the cases that ran to their end."""
    errors = [abs(row["ratio"] - 1) for row in rows if "ratio" in row]
    if not errors:
        return {"cases": 0}
    return {
        "cases": len(errors),
        "median": round(statistics.median(errors), 3),
        "worst": round(max(errors), 3),
    }


def main() -> None:
    cases = yaml.safe_load((HERE / "published_specs.yaml").read_text(encoding="utf-8"))["cases"]
    kept: dict[str, Row] = {}
    if RESULT.is_file():
        kept = {row["name"]: row for row in json.loads(RESULT.read_text())["rows"]}
    names = sys.argv[1:] or [case["name"] for case in cases]
    with capacity_runs_of(STEPS) as run_for_capacity:
        for case in (case for case in cases if case["name"] in names):
            kept[case["name"]] = planned(case, run_for_capacity)
            print(json.dumps(kept[case["name"]]), flush=True)
            rows = [kept[one["name"]] for one in cases if one["name"] in kept]
            write(RESULT, {"summary": summary(rows), "rows": rows})
    print(json.dumps(summary(rows)))


if __name__ == "__main__":
    main()
