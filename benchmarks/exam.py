"""How the verifier does on scripts whose authors knew none of its rules.

    python benchmarks/exam.py tests/exam/round14 --out build/exam_round14.json \\
        --publish benchmarks/results/exam.json
    python benchmarks/exam.py tests/exam/round4 --from    # all of a past round, from the history
    python benchmarks/exam.py tests/exam/round4           # what is kept of it

A new round is a folder of cases: a case.yaml (`kind: fault` or `right`, `save_args`, `resume_args`,
what is wrong and how its author proved it) and `right/train.py`; a fault has `wrong/train.py` too,
which differs from its right twin in as few lines as possible. Each script is verified with the
defaults and these arguments; a case that turned out to be wrong itself (`not_right`: why) is left
out. A fault is found if it fails a rule that its twin does not fail (a warning is no failure); a
right script whose verdict is `fail` is a false alarm. `named`: the first such finding says what to
change, as a reader judged it. A round counts once, at first sight: what is published is measured
before anything is changed for it.

Of a past round those cases are kept that decide something. Their folders hold the right script;
cases.yaml of the round says why each is kept and makes the fault by edits of the right script
(tests/exam/README.md).
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import shutil
import subprocess
import tarfile
import tempfile
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from corpus import edit
from detection_table import wilson
from results_file import write
from verified_fsdp2.verifier.config.target import resolve
from verified_fsdp2.verifier.isolation.leftovers import temporary
from verified_fsdp2.verifier.isolation.worlds import wish
from verified_fsdp2.verifier.launch.client import Launcher
from verified_fsdp2.verifier.pipeline import select, verify_with
from verified_fsdp2.verifier.rules import RULES

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = ROOT / "tests" / "exam"
# the last commit that holds every script and every row of rounds 1 to 13
WHOLE = "2099be1a5accefdf5188cb9a53ab65154997d2d7"
SETTINGS = ("save_args", "resume_args", "args", "nproc")
FIGURES = ("found", "named", "false_alarms", "right_inconclusive")


@dataclass(frozen=True)
class Script:
    """One script of a round; its kind is "fault", "twin" (the right script of it) or "right".

    A fault whose case names the `folder` of another case has that case's script as its twin.
    """

    case: str
    kind: str
    folder: Path
    about: dict[str, Any] = field(repr=False)
    edits: tuple[dict[str, str], ...] = field(default=(), repr=False)

    @property
    def settings(self) -> dict[str, Any]:
        return {key: self.about[key] for key in SETTINGS if self.about.get(key)}

    def copy(self, into: Path) -> Path:
        """The script to verify, in a copy of its folder."""
        shutil.copytree(self.folder, into, ignore=shutil.ignore_patterns("__pycache__"))
        edit(into, self.edits, f"{self.folder.parent.name}/{self.case}")
        return into / "train.py"


def scripts(folder: Path) -> list[Script]:
    """The scripts of a round as its authors wrote it, or of what is kept of it."""
    found = []
    if (kept := folder / "cases.yaml").exists():
        for name, case in yaml.safe_load(kept.read_text(encoding="utf-8")).items():
            place = folder / case.get("folder", name)
            if case["kind"] == "fault":
                found.append(Script(name, "fault", place, case, tuple(case["edits"])))
            if "folder" not in case:
                kind = "twin" if case["kind"] == "fault" else "right"
                found.append(Script(name, kind, place, case))
    for about in sorted(folder.glob("*/case.yaml")):
        case = yaml.safe_load(about.read_text(encoding="utf-8"))
        if "not_right" in case:
            continue
        kinds = (
            {"wrong": "fault", "right": "twin"} if case["kind"] == "fault" else {"right": "right"}
        )
        found += [
            Script(about.parent.name, kind, about.parent / name, case)
            for name, kind in kinds.items()
        ]
    return found


def history(commit: str, into: Path) -> Path:
    """The folder `into` with tests/exam and benchmarks/results as the commit has them."""
    command = ["git", "archive", "--format=tar", commit, "tests/exam", "benchmarks/results"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise SystemExit(
            f"this clone has no commit {commit}, which holds the rounds of the exam ({said}); "
            "if its history is shallow, `git fetch --unshallow` gets the rest"
        )
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(into, filter="data")
    return into


def judge(script: Script, launcher: Launcher, only: Collection[str] = ()) -> dict[str, Any]:
    """The row of one script; `only`: the rules that are judged, without them all."""
    with tempfile.TemporaryDirectory() as place:
        copy = script.copy(Path(place) / "project")
        try:
            verdict = verify_with(
                launcher, resolve(copy, script.settings), Path(place) / "work", select(only, ())
            )
        except Exception as error:  # of the script's arguments, or of ours: a result too
            return {
                "verdict": "error",
                "first": "",
                "failed": [],
                "evidence": f"{type(error).__name__}: {error}"[:300],
            }
    failed = [f for f in verdict.findings if f.status == "fail" and f.required]
    first = next((f for f in failed if not f.consequence), failed[0] if failed else None)
    return {
        "verdict": verdict.verdict,
        "first": first.rule if first else "",
        "evidence": first.evidence[:300] if first else "",
        "line": first.location.line if first and first.location else None,
        "failed": [f.rule for f in failed],
        "warned": [f.rule for f in verdict.findings if f.warns],
        "inconclusive": [f.rule for f in verdict.findings if f.status == "inconclusive"],
        "seconds": round(verdict.seconds, 1),
    }


def share(part: int, whole: int) -> dict[str, Any]:
    """A share with its 95 % interval."""
    if not whole:
        return {"of": 0}
    return {
        "number": part,
        "of": whole,
        "share": round(part / whole, 3),
        "interval": [round(x, 3) for x in wilson(part, whole)],
    }


def new_failures(row: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """The rules that a wrong script fails and its right twin does not."""
    of = row.get("twin", row["case"])
    twin = next((r for r in rows if r["kind"] != "fault" and r["case"] == of), {"failed": []})
    return [rule for rule in row["failed"] if rule not in twin["failed"]]


def summary(
    rows: list[dict[str, Any]], versions: dict[str, Any], named: list[str]
) -> dict[str, Any]:
    """The figures of a round, and its rows."""
    faults = [row for row in rows if row["kind"] == "fault"]
    good = [row for row in rows if row["kind"] != "fault"]
    return {
        "environment": {**versions, "platform": platform.platform(), "cores": os.cpu_count()},
        "found": share(sum(bool(new_failures(row, rows)) for row in faults), len(faults)),
        "named": share(sum(row["case"] in named for row in faults), len(faults)),
        "false_alarms": share(sum(row["verdict"] == "fail" for row in good), len(good)),
        "right_inconclusive": share(
            sum(row["verdict"] in ("inconclusive", "error") for row in good), len(good)
        ),
        "rows": [
            {**row, "new": new_failures(row, rows)} if row["kind"] == "fault" else row
            for row in rows
        ],
    }


def published(before: dict[str, Any], number: int, results: dict[str, Any]) -> dict[str, Any]:
    """The page of figures with one more round: its shares, and its rows added to the counts of the
    laws.
    """
    if any(row["round"] == number for row in before.get("rounds", ())):
        raise SystemExit(f"round {number} is published: a round counts once, at first sight")
    rounds = [
        *before.get("rounds", ()),
        {"round": number, **{name: results[name] for name in FIGURES}},
    ]
    laws = {name for name, rule in RULES.items() if rule.family == "laws"}
    general = laws | {name for name, rule in RULES.items() if rule.family == "parity"}
    counts = Counter(
        {
            (row["law"], key): row[key]
            for row in before.get("laws", ())
            for key in row
            if key != "law"
        }
    )
    for row in results["rows"]:
        for law in laws.intersection(row["new"] if row["kind"] == "fault" else row["failed"]):
            if row["kind"] == "fault":
                counts[law, "faults"] += 1
                counts[law, "by_laws_and_comparisons_alone"] += set(row["new"]) <= general
            else:
                counts[law, "right"] += 1
    met = sorted({law for law, _ in counts}, key=lambda law: (-counts[law, "faults"], law))
    kinds = ("faults", "by_laws_and_comparisons_alone", "right")
    by_law = [{"law": law, **{kind: counts[law, kind] for kind in kinds}} for law in met]
    return {**before, "rounds": sorted(rounds, key=lambda row: row["round"]), "laws": by_law}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("round", type=Path, help="the folder of a round")
    parser.add_argument(
        "--from", dest="commit", nargs="?", const=WHOLE, help="read the round as this commit has it"
    )
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument(
        "--publish", type=Path, help="add the figures of this new round to this file"
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument(
        "--named", default="", help="cases whose first finding names what to change, by comma"
    )
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as past, Launcher(wish=wish(temporary("runs"))) as launcher:
        folder = options.round
        if options.commit:
            folder = history(options.commit, Path(past)) / folder.resolve().relative_to(ROOT)
        for script in scripts(folder):
            if options.only in script.case:
                head = {"case": script.case, "kind": script.kind}
                if "folder" in script.about:
                    head["twin"] = script.about["folder"]
                rows.append({**head, **judge(script, launcher)})
                row = rows[-1]
                said = f"{row['first']}: {row['evidence']}"
                print(f"{script.kind:<6}{row['verdict']:<13}{script.case:<40}{said}", flush=True)
        results = summary(rows, launcher.versions, options.named.split(","))
    print(json.dumps({key: value for key, value in results.items() if key != "rows"}, indent=1))
    if options.out:
        write(options.out, results)
    if options.publish:
        before = json.loads(options.publish.read_text(encoding="utf-8"))
        write(
            options.publish,
            published(before, int(options.round.name.removeprefix("round")), results),
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
