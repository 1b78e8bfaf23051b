"""Grade a solution of a task against oracles that know nothing of this repository's verifier.

    python evals/grade.py TASK FOLDER [--text] [--grading FILE] [--slow N]

Prints JSON (with --text a table). Exit code 0 if every check holds, 1 if not, 2 for bad usage, 3 if
the grader could not judge, such as on a machine that is too slow for its own oracle. A check that
could not be made, because a run that it needs failed, has `passed: null`. `--grading` writes the
same as a grading.json of the Agent Skills evaluation guide.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from grader.checks import CHECKS, Grading, judge
from grader.launch import Launch
from grader.oracle import PERTURBED, Oracle
from grader.rank import Disturb
from grader.record import Record
from grader.tasks import Task, load, names

SECONDS = 58.0  # for all of a task; --slow multiplies both
ONE_LAUNCH = 25.0


class OracleFailed(Exception):
    """Our own fault: the oracle did not run, or is no oracle."""


def words(args: str, out: Path) -> tuple[str, ...]:
    return tuple(word.replace("{out}", str(out)) for word in args.split())


def command(task: Task, run: str) -> str:
    """The command line of a run, as the user would type it."""
    reported = task.values["runs"][run]
    start = f"torchrun --nproc-per-node {reported['ranks']}" if reported["ranks"] else "python"
    return f"`{start} {task.script} {reported.get('args', '').replace('{out}', 'out')}`".replace(
        " `", "`"
    )


def sentences(task: Task) -> list[str]:
    """The expectations in words, one for each check."""
    result = []
    for kind, reported in parameters(task):
        values = {"most": 0.6, "over": 0, **reported, "run": command(task, reported["run"])}
        values = {
            k: ", ".join(map(str, v)) if isinstance(v, list) else v for k, v in values.items()
        }
        sentence = CHECKS[kind].sentence if kind in CHECKS else "{run} ends well"
        result.append(sentence.format_map(values))
    return result


def parameters(task: Task) -> list[tuple[str, dict[str, Any]]]:
    """The checks with their parameters, the success of each run first."""
    killed = {reported["run"] for kind, reported in task.checks if kind == "killed"}
    result: list[tuple[str, dict[str, Any]]] = [
        ("runs", {"run": run}) for run in task.values["runs"] if run not in killed
    ]
    for kind, reported in task.checks:
        if kind == "sharded":
            reported = {"over": task.values["runs"][reported["run"]]["ranks"], **reported}
        result.append((kind, reported))
    return result


def prepare(task: Task, code: Path, out: Path, folder: Path, until: float) -> str:
    """Run the start's own script that makes what the runs need, such as weights to begin from."""
    if "prepare" not in task.values:
        return ""
    reported = task.values["prepare"]
    return Launch(code / reported["script"], words(reported["args"], out), 0, folder).run(until)


def run_oracle(task: Task, folder: Path, until: float) -> Oracle:
    """The oracle and its perturbed repetitions."""
    reported, records = task.values["oracle"], []
    for number in range(PERTURBED + 1):
        script = task.write_oracle(folder / f"oracle-code{number}") / task.script
        out = folder / f"oracle{number}"
        out.mkdir()
        argv = words(reported.get("args", ""), out)
        ranks, where = int(reported.get("ranks", 0)), folder / f"oracle-run{number}"
        launch = Launch(script, argv, ranks, where, Disturb(perturb=number))
        failed = prepare(task, script.parent, out, folder / f"prepare{number}", until)
        if failed := failed or launch.run(until):
            raise OracleFailed(f"{task.name}: {failed}")
        records.append(Record(launch.folder, 1))
    if any(piece["sharded"] for piece in records[0].parameters(0)[0].values()):
        raise OracleFailed(f"{task.name}: the oracle is sharded")
    return Oracle(records[0], tuple(records[1:]))


def run_solution(
    task: Task, grading: Grading, code: Path, folder: Path, until: float, one: float
) -> None:
    """Every run of the solution, in order; those that need a run that failed are not tried."""
    if failed := prepare(
        task, grading.oracle_out.with_name("oracle-code0"), grading.out, folder / "prepare", until
    ):
        raise OracleFailed(f"{task.name}: {failed}")
    for name, reported in task.values["runs"].items():
        needs = reported.get("after")
        if needs in grading.failed and not task.values["runs"][needs].get("die_at"):
            grading.failed[name] = f"not tried: {needs} failed"
            continue
        script = code / task.script
        if not script.is_file():
            grading.failed[name] = f"no file {task.script}"
            continue
        argv = words(reported.get("args", ""), grading.out)
        disturb = Disturb(
            die_at=reported.get("die_at", 0), slow_save=reported.get("slow_save", 0.0)
        )
        launch = Launch(script, argv, reported["ranks"], folder / ("run-" + name), disturb)
        left = min(until, time.monotonic() + one)
        if failed := launch.run(left):
            grading.failed[name] = failed
        grading.runs[name] = Record(launch.folder, max(reported["ranks"], 1))


def grade(
    task: Task, solution: Path, slow: float = 1.0, known: tuple[Path, Oracle] | None = None
) -> dict[str, Any]:
    """Run a solution, and what every check says of it; `known` is the oracle and its folder if it
    ran before.
    """
    begin = time.monotonic()
    until = begin + SECONDS * slow
    checks: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="grade-") as name:
        folder = Path(name)
        out = folder / "out"
        out.mkdir()
        ignored = shutil.ignore_patterns("__pycache__", ".git", ".venv")
        code = Path(shutil.copytree(solution, folder / "code", symlinks=True, ignore=ignored))
        where, oracle = known or (folder, run_oracle(task, folder, until))
        grading = Grading(task, code, out, where / "oracle0", oracle)
        run_solution(task, grading, code, folder, until, ONE_LAUNCH * slow)
        for kind, reported in parameters(task):
            needed = [
                grading.failed[run]
                for run in (reported["run"], reported.get("of"))
                if run in grading.failed
            ]
            label = f"{kind}:{reported['run']}"
            passed: bool | None = None
            detail = "not reached"
            if kind == "runs":
                passed, detail = not needed, needed[0] if needed else "exit code 0"
            elif not needed or kind in ("killed", "marker-last"):
                passed, detail = judge(grading, kind, reported)
            checks.append(
                {"name": label, "passed": passed, "detail": detail.replace(f"{folder}/", "")}
            )
    good = all(row["passed"] for row in checks)
    return {
        "task": task.name,
        "passed": good,
        "checks": checks,
        "seconds": round(time.monotonic() - begin, 1),
    }


def as_grading(task: Task, result: dict[str, Any]) -> dict[str, Any]:
    """The result as the guide's grading.json."""
    rows = [
        {
            "text": text,
            "passed": bool(row["passed"]),
            "evidence": row["name"] + ": " + row["detail"],
        }
        for text, row in zip(sentences(task), result["checks"], strict=True)
    ]
    good = sum(row["passed"] for row in rows)
    summary = {
        "passed": good,
        "failed": len(rows) - good,
        "total": len(rows),
        "pass_rate": round(good / len(rows), 2),
    }
    return {"assertion_results": rows, "summary": summary}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=names(), metavar="TASK", help="a folder of evals/tasks")
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="the repository as the agent left it"
    )
    parser.add_argument("--text", action="store_true", help="print a table for people")
    parser.add_argument("--grading", type=Path, metavar="FILE", help="also write grading.json")
    parser.add_argument(
        "--slow", type=float, default=1.0, metavar="N", help="N times the time, for a busy machine"
    )
    options = parser.parse_args(argv)
    if not options.folder.is_dir():
        parser.error(f"no folder {options.folder}")
    task = load(options.task)
    try:
        result = grade(task, options.folder, options.slow)
    except OracleFailed as error:
        print(f"the grader could not judge: {error}", file=sys.stderr)
        return 3
    if options.grading:
        options.grading.write_text(
            json.dumps(as_grading(task, result), indent=2) + "\n", encoding="utf-8"
        )
    if options.text:
        words_of = {True: "pass", False: "FAIL", None: "-"}
        for row in result["checks"]:
            print(f"{words_of[row['passed']]:<5}{row['name']:<28}{row['detail']}")
        print(f"{task.name}: {'passed' if result['passed'] else 'failed'} in {result['seconds']} s")
    else:
        print(json.dumps(result, indent=2))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
