"""Public trainers, unmodified: a plain run, a verification, and what its findings are worth.

    python benchmarks/field.py --checkouts DIR [--environments DIR] [--only NAME,NAME] [--quick] \\
        [--out benchmarks/results/field.json]

`DIR/NAME` (or the name under `checkout`) is a checkout of the repository that
`benchmarks/field/NAME.yaml` names; `ENVIRONMENTS/NAME/bin/python` (else this Python) has its
packages. Each YAML says repository, commit, packages, command, options of `fsdp2 verify`, and the
judgement of every failure by an experiment of its own. A script under `prepare` writes data,
tokenizer and configuration into a folder, `{data}` in the command, the environment, and `root` (the
working folder); `{checkout}` is the checkout. The trainer's code is never edited: a checkout with
changes is refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from machine import environment
from results_file import write

HERE = Path(__file__).resolve().parent / "field"
PLAIN_LIMIT, VERIFY_LIMIT = 300, 1500


def entry_of(path: Path) -> dict[str, Any]:
    """One trainer. Raises SystemExit if a key is missing."""
    entry: dict[str, Any] = {
        "root": ".",
        "environment": {},
        "verify": [],
        "judgement": [],
        **yaml.safe_load(path.read_text()),
    }
    if missing := {"name", "repository", "commit", "command"} - entry.keys():
        raise SystemExit(f"{path}: no {', '.join(sorted(missing))}")
    return entry


def checked_out(entry: dict[str, Any], folder: Path) -> str:
    """Why a checkout cannot be used, or ""."""
    git = ["git", "-C", str(folder)]
    if not folder.is_dir():
        return "no checkout"
    commit = subprocess.run(
        [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    changed = subprocess.run(
        [*git, "diff", "--quiet", "--diff-filter=M", "HEAD"], check=False
    ).returncode
    return (
        f"at {commit[:12]}, not {entry['commit'][:12]}"
        if commit != entry["commit"]
        else "changed"
        if changed
        else ""
    )


def python_of(entry: dict[str, Any], environments: Path | None) -> str:
    """The Python that has the trainer's packages."""
    own = (
        environments / entry.get("checkout", entry["name"]) / "bin" / "python"
        if environments
        else None
    )
    return str(own) if own and own.exists() else sys.executable


def timed(
    command: list[str], entry: dict[str, Any], root: Path, limit: float
) -> tuple[int, float, str]:
    """(exit code, seconds, last error on stderr) of a command in the trainer's folder; the code is
    124 where the time was over.
    """
    started = time.monotonic()
    settings = os.environ | {key: str(value) for key, value in entry["environment"].items()}
    try:
        done = subprocess.run(
            command,
            cwd=root,
            env=settings,
            capture_output=True,
            text=True,
            check=False,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return 124, time.monotonic() - started, f"not over after {limit:.0f} s"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b(?!ChildFailed)\w*Error: ", line)] or lines
    return done.returncode, time.monotonic() - started, errors[-1][:200] if errors else ""


@dataclasses.dataclass(frozen=True)
class Ready:
    """A trainer whose data lie in `data`: what to start, and where."""

    entry: dict[str, Any]
    folder: Path
    python: str
    data: Path

    def filled(self, text: object) -> str:
        """A text of the YAML with its placeholders replaced."""
        return (
            str(text)
            .replace("{data}", str(self.data))
            .replace("{checkout}", str(self.folder.resolve()))
        )

    @property
    def root(self) -> Path:
        """The folder to start in."""
        return self.folder / self.filled(self.entry["root"])

    @property
    def settings(self) -> dict[str, Any]:
        """The entry with its environment filled in."""
        return {
            **self.entry,
            "environment": {key: self.filled(it) for key, it in self.entry["environment"].items()},
        }

    @property
    def command(self) -> tuple[list[str], list[str]]:
        """What to run, and its arguments."""
        script, *args = map(self.filled, shlex.split(self.entry["command"]))
        return (["-m", args.pop(0)] if script == "-m" else [script]), args

    @property
    def options(self) -> list[str]:
        """Options of `fsdp2 verify`."""
        return [self.filled(word) for word in self.entry["verify"]]

    def prepare(self) -> None:
        """Write the data."""
        if "prepare" in self.entry:
            command = [self.python, str(HERE / self.entry["prepare"]), str(self.data)]
            subprocess.run(command, cwd=self.root, check=True, capture_output=True)

    def plain(self) -> tuple[int, float, str]:
        """A run without the verifier; see `timed`."""
        target, args = self.command
        ranks = (
            self.options[self.options.index("--nproc") + 1] if "--nproc" in self.options else "2"
        )
        torchrun = [
            self.python,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            ranks,
        ]
        return timed([*torchrun, *target, *args], self.settings, self.root, PLAIN_LIMIT)

    def verified(self, quick: bool) -> tuple[dict[str, Any], float]:
        """(report, seconds) of a verification."""
        target, args = self.command
        report = self.data.parent / "report.json"
        report.unlink(missing_ok=True)
        options = [*self.options, "--report", f"json={report}", *(["--quick"] if quick else [])]
        fsdp2 = [self.python, str(HERE.parents[1] / "skill"), "verify", *target, *options]
        ended, took, _ = timed(
            [*fsdp2, *(["--", *args] if args else [])], self.settings, self.root, VERIFY_LIMIT
        )
        nothing = {"verdict": f"exit {ended}", "findings": [], "counts": {}}
        return json.loads(report.read_text()) if report.exists() else nothing, took


def measure(entry: dict[str, Any], folder: Path, python: str, quick: bool) -> dict[str, Any]:
    """The row of one trainer."""
    with tempfile.TemporaryDirectory(prefix="fsdp2-field-") as name:
        ready = Ready(entry, folder, python, Path(name, "data"))
        ready.data.mkdir()
        ready.prepare()
        code, seconds, last = ready.plain()
        found, took = ready.verified(quick)
    plain = {"exit": code, "seconds": round(seconds, 1), **({"error": last} if code else {})}
    row = {
        "name": entry["name"],
        "commit": entry["commit"][:12],
        "plain": plain,
        "verify_seconds": round(took, 1),
    }
    return {**row, "verdict": found["verdict"], "counts": found["counts"], **judged(found, entry)}


def judged(report: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    """The failures of a report, each with its judgement, and the reasons of what is
    inconclusive.
    """
    known = {one["rule"]: one for one in entry["judgement"]}
    failures, reasons = [], {}
    for finding in report["findings"]:
        if finding["status"] == "fail":
            own = known.get(finding["rule"], {})
            place = finding.get("location") or {}
            where = f"{Path(place['file']).name}:{place['line']}" if place else ""
            truth = {"true_fault": own.get("true_fault"), "by": own.get("by", "not judged")}
            failures.append(
                {
                    "rule": finding["rule"],
                    "at": where,
                    "consequence": bool(finding.get("consequence")),
                    **truth,
                }
            )
        elif finding["status"] == "inconclusive":
            reasons.setdefault(finding["evidence"][:160], []).append(finding["rule"])
    return {
        "failures": failures,
        "inconclusive": [{"reason": why, "rules": len(rules)} for why, rules in reasons.items()],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as references/reliability.md shows them."""
    counted = "failed (with consequences), passed, not checked, not applicable"
    lines = [
        f"| trainer | at commit | verdict | {counted} | failures, each judged by an experiment |"
    ]
    lines.append("|---|---|---|---|---|")
    for row in rows:
        if "not_run" in row:
            lines.append(
                f"| {row['name']} | `{row['commit'][:7]}` | not run | | {row['not_run']} |"
            )
            continue
        counts = ", ".join(
            str(row["counts"].get(name, 0))
            for name in ("fail", "pass", "inconclusive", "not_applicable")
        )
        causes = [one for one in row["failures"] if not one["consequence"]]
        words = {True: "true", False: "FALSE", None: "not judged"}
        shown = ", ".join(f"{one['rule']} ({words[one['true_fault']]})" for one in causes)
        lines.append(
            f"| {row['name']} | `{row['commit'][:7]}` | {row['verdict']} | {counts} | {shown} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure the trainers and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkouts", type=Path, required=True)
    parser.add_argument("--environments", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--out", type=Path, help="results to write; rows of trainers that are not run again stay"
    )
    options = parser.parse_args()
    rows = []
    for path in sorted(HERE.glob("*.yaml")):
        entry = entry_of(path)
        if options.only and entry["name"] not in options.only.split(","):
            continue
        folder = options.checkouts / entry.get("checkout", entry["name"])
        if "not_run" in entry or (trouble := checked_out(entry, folder)):
            row = {
                "name": entry["name"],
                "commit": entry["commit"][:12],
                "not_run": entry.get("not_run") or trouble,
            }
        else:
            row = measure(entry, folder, python_of(entry, options.environments), options.quick)
        print(json.dumps(row), flush=True)
        rows.append(row)
    if options.out:
        old = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
        kept = [row for row in old if row["name"] not in {new["name"] for new in rows}]
        write(
            options.out,
            {
                "environment": environment(),
                "rows": sorted([*kept, *rows], key=lambda row: row["name"].lower()),
            },
        )


if __name__ == "__main__":
    main()
