"""Try seeded faults of production and their right twins: is each found, with its line, and is
nothing said of the twins?

`python benchmarks/plan/seeded.py [NAME...]` makes the scripts from faults/decoder.py and
faults/faults.yaml, tries each as rank 0 of 64 and prints a line for each;
benchmarks/results/plan_faults.json has the newest of each.
"""

import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from capacity_runs import GIB, Seen, capacity_runs_of
from results_file import write

HERE = Path(__file__).parent
RESULT = HERE.parent / "results" / "plan_faults.json"


def edited(text: str, edits: Sequence[Mapping[str, str]]) -> str:
    for edit in edits:
        if text.count(edit["old"]) != 1:
            raise SystemExit(
                f"faults.yaml: {edit['old']!r} is {text.count(edit['old'])} times in decoder.py"
            )
        text = text.replace(edit["old"], edit["new"])
    return text


def scripts(faults: Sequence[Mapping[str, Any]], folder: Path) -> Iterator[tuple[str, Path]]:
    text = (HERE / "faults" / "decoder.py").read_text()
    for fault in faults:
        for kind in ("fault", "twin"):
            path = folder / f"{fault['name']}_{kind}.py"
            path.write_text(
                edited(text, fault["edits"] if kind == "fault" else fault.get("twin", []))
            )
            yield f"{fault['name']} {kind}", path


def fitting(seen: Seen) -> int:
    """GiB of the smallest GPU that holds the tensors of a script."""
    return (
        math.ceil(max((peak.bytes for peak in seen.record.peaks), default=0) / GIB)
        if seen.record
        else 0
    )


def complaints(seen: Seen, limit: int) -> list[str]:
    """The complaints of a plan about a script on a GPU of `limit` GiB, each as `kind:line of
    code`.
    """
    found = [f"error:{error}" for error in seen.errors]
    if seen.record is None:
        return found or ["error:no record"]
    found += [
        f"read:{read.at_line.code}"
        for read in seen.record.reads
        if read.in_step and read.synchronizes and read.count >= seen.record.steps and read.at_line
    ]
    for peak in seen.record.peaks:
        if peak.bytes > limit * GIB:
            kind = max(peak.kinds, key=lambda name: peak.kinds[name])
            found.append(
                f"memory:{peak.at_line.code if peak.at_line else ''} ({kind}, {peak.phase},"
                f" {peak.bytes / GIB:.1f} GiB)"
            )
    return found


def judged(fault: Mapping[str, Any], said: Sequence[str], silent: Sequence[str]) -> dict[str, Any]:
    """Whether the fault is found, with its line or with the kind of memory, and what is said of the
    twin.
    """
    right = [line for line in said if line.startswith(fault["expect"])]
    line = any(fault["at"].splitlines()[0] in one for one in right)
    kind = fault.get("kind") is not None and any(f"({fault['kind']}," in one for one in right)
    return {
        "name": fault["name"],
        "expect": fault["expect"],
        "found": line or kind,
        "line": line,
        "reported": [one[:160] for one in said][:4],
        "twin": [one[:160] for one in silent][:4],
    }


def main() -> None:
    data = yaml.safe_load((HERE / "faults" / "faults.yaml").read_text())
    names = sys.argv[1:]
    faults = [fault for fault in data["faults"] if not names or fault["name"] in names]
    rows = []
    with tempfile.TemporaryDirectory() as folder, capacity_runs_of() as run_for_capacity:
        made = dict(scripts(faults, Path(folder)))
        texts = {path.read_text(): path for path in made.values()}
        seen: dict[Path, Seen] = {}
        for fault in faults:
            both = [
                texts[made[f"{fault['name']} {kind}"].read_text()] for kind in ("fault", "twin")
            ]
            seen.update(
                {
                    path: run_for_capacity(path, [], data["nproc"])
                    for path in both
                    if path not in seen
                }
            )
            limit = fitting(seen[both[1]])
            row = judged(fault, *(complaints(seen[path], limit) for path in both))
            rows.append(row)
            print(
                f"{row['name']:26} found {row['found']!s:5}  line {row['line']!s:5} "
                f" {row['reported']}  twin {row['twin']}",
                flush=True,
            )
    known = json.loads(RESULT.read_text())["rows"] if names and RESULT.is_file() else []
    by_name = {row["name"]: row for row in (*known, *rows)}
    rows = [by_name[fault["name"]] for fault in data["faults"] if fault["name"] in by_name]
    found, lines, false = (
        sum(map(bool, (row[key] for row in rows))) for key in ("found", "line", "twin")
    )
    print(f"{found} of {len(rows)} found, {lines} with the line, {false} twins with a complaint")
    write(
        RESULT, {"faults": len(rows), "found": found, "lines": lines, "false": false, "rows": rows}
    )


if __name__ == "__main__":
    main()
