"""Does a plan complain of right scripts?

Each right script of tests/zoo, in the spelling of GPUs, is tried at its own size.

`python benchmarks/plan/zoo.py [NAME...]` prints and stores what is said of each: nothing, an error,
or why it was not followed to its end. Where an error is said, the script runs on real tensors too:
one that it raises there is an error of the spelling (`real`), else it is a false one.
"""

import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for corpus, for_gpus and results_file

from for_gpus import for_gpus

from capacity_runs import RunForCapacity, capacity_runs_of
from corpus import Case, right
from results_file import write

RESULT = Path(__file__).parents[1] / "results" / "plan_zoo.json"
Row = dict[str, Any]


def said(case: Case, run_for_capacity: RunForCapacity) -> Row:
    """What the plan says of a script."""
    row: Row = {"name": case.path.stem}
    try:
        text = for_gpus(case.path.read_text(encoding="utf-8"))
    except ValueError as error:
        text, row["spelling"] = case.path.read_text(encoding="utf-8"), f"as it is: {error}"
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / case.path.name
        script.write_text(text, encoding="utf-8")
        words = shlex.split(f"{case.settings.get('args', '')} {case.settings.get('save_args', '')}")
        ranks = int(case.settings.get("nproc", 2))
        seen = run_for_capacity(script, words, ranks, cwd=Path(folder))
        row["bytes"] = (
            max((peak.bytes for peak in seen.record.peaks), default=0) if seen.record else None
        )
        if seen.trouble is not None:
            row |= {"said": seen.trouble.text[:200], "unfollowed": bool(seen.trouble.unfollowed)}
            if not seen.trouble.unfollowed:
                row["real"] = list(
                    run_for_capacity(script, words, ranks, "count", Path(folder)).errors
                )
    return row


def main() -> None:
    cases = [case for case in right() if case.path.parent.name == "zoo" and case.path.is_file()]
    kept = (
        {row["name"]: row for row in json.loads(RESULT.read_text())["rows"]}
        if RESULT.is_file()
        else {}
    )
    names = sys.argv[1:] or [case.path.stem for case in cases]
    with capacity_runs_of(steps=3) as run_for_capacity:
        for case in (case for case in cases if case.path.stem in names):
            row = kept[case.path.stem] = said(case, run_for_capacity)
            print(*row.values(), flush=True)
            rows = [kept[one.path.stem] for one in cases if one.path.stem in kept]
            troubled = [one for one in rows if "said" in one]
            summary = {
                "scripts": len(rows),
                "false": sum(not one["unfollowed"] and not one.get("real") for one in troubled),
                "of_the_spelling": sum(bool(one.get("real")) for one in troubled),
                "unfollowed": sum(one["unfollowed"] for one in troubled),
            }
            write(RESULT, {"summary": summary, "rows": rows})
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
