"""The results of the trials in one file: each way by mechanism, the kills, and what goes on beside.

    python benchmarks/isolation/table.py --out benchmarks/results/isolation.json FOLDER

FOLDER has `ways.MECHANISM.json`, `kills.MECHANISM.json` and `beside.MECHANISM.json`, as the other
programs of this folder write them with `--out`. `before.json` beside this file is the table of
version 0.2.0 (90b70aaa), which copied files back after a run.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from results_file import write

BEFORE = Path(__file__).with_name("before.json")
STOPPED = "stopped"  # held, because the run was stopped before it


def outcome(row: dict[str, Any]) -> str:
    """What became of a way: `held`, or what was wrong."""
    blocked = row["outcome"] == "held" and not row.get("performed") and row.get("exit") == 4
    return STOPPED if blocked else row["outcome"]


def ways(files: dict[str, Path]) -> dict[str, dict[str, str]]:
    """Way: mechanism: outcome."""
    found: dict[str, dict[str, str]] = {}
    for name, file in files.items():
        for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
            found.setdefault(row["way"], {})[name] = outcome(row)
    return found


def named(folder: Path, kind: str) -> dict[str, Path]:
    """Mechanism: the file of its results."""
    return {path.name.split(".")[1]: path for path in sorted(folder.glob(f"{kind}.*.json"))}


def kills(file: Path) -> dict[str, str]:
    """Signal: how many trials were right."""
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    return {row["signal"]: f"{row['right']} of {row['sent'] + row['ended_before']}" for row in rows}


def main() -> int:
    whole = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=whole)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    table = ways({"before": BEFORE, **named(given.folder, "ways")})
    mechanisms = dict.fromkeys(name for row in table.values() for name in row)
    counts = {
        name: sum(row.get(name) in ("held", STOPPED) for row in table.values())
        for name in mechanisms
    }
    found: dict[str, Any] = {"ways": len(table), "held": counts}
    for kind, read in (("kills", kills), ("beside", lambda file: json.loads(file.read_text()))):
        found[kind] = {name: read(file) for name, file in named(given.folder, kind).items()}
    found["by_way"] = [{"way": way, **row} for way, row in table.items()]
    write(given.out, found)
    print(json.dumps(counts))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
