"""A verdict held against an earlier JSON report: what is new, what stands, what has gone. Only what is new fails a gate.

A failure whose rule no longer applies is gone: the script has nothing of the kind any more.
"""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from ..errors import UserError
from ..finding import Finding
from ..trace.events import Place
from ..verdict import Comparison, Verdict

SCHEMA = Path(__file__).parent / "report.schema.json"
READABLE = (1,)  # earlier versions whose failures are read; roles and statuses changed since, failures did not
_AGAIN = "write one with --report json=PATH"

Report = dict[str, Any]


def load(path: Path) -> Report:
    """The report in a file. Raises UserError if it is none of a version that is read."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"--baseline {path}: no such file; {_AGAIN}") from None
    except OSError as error:
        raise UserError(f"--baseline {path}: cannot be read: {error.strerror or error}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}; {_AGAIN}") from None
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        raise UserError(f"{path}:1:1: not JSON: {error}; {_AGAIN}") from None
    _must_be_ours(path, report)
    found: Report = report
    return found


def _must_be_ours(path: Path, report: Any) -> None:
    from jsonschema import Draft7Validator
    from jsonschema.exceptions import best_match

    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    ours = schema["properties"]["schema"]["const"]
    read = (*READABLE, ours)
    if not isinstance(report, dict) or "schema" not in report:
        raise UserError(f"{path}:1:1: not a report of fsdp2; {_AGAIN}")
    if report["schema"] not in read:
        known = f"this program reads {' and '.join(map(str, read))}"
        raise UserError(f"{path}:1:1: the report has schema version {report['schema']!r}, {known}; {_AGAIN}")
    if report["schema"] != ours:  # only what a comparison reads
        parts = {name: schema["properties"][name] for name in ("target", "findings")}
        schema = {"required": list(parts), "properties": parts, "definitions": schema["definitions"]}
    error = best_match(Draft7Validator(schema).iter_errors(report))
    if error is not None:
        place = ".".join(map(str, error.absolute_path)) or "the report"
        raise UserError(f"{path}:1:1: not a report of fsdp2: {place}: {error.message[:200]}; {_AGAIN}")


def must_be_of(path: Path, report: Report, target: Mapping[str, Any]) -> None:
    """Raises UserError if the report is of another target than this one."""
    old, new = name_of(report["target"]), name_of(target)
    if old != new and report["target"]["script"] != target["script"]:
        raise UserError(f"--baseline {path}: a report on {old}, not on {new}; give the report of the same target")


def name_of(target: Mapping[str, Any]) -> str:
    """The target as it is called by who verifies it, the same in every checkout."""
    kind = "lint" if "files" in target else "verify"
    if target.get("module"):
        return f"{kind} -m {target['module']}"
    try:
        words = shlex.split(str(target.get("command", "")))
    except ValueError:
        words = []
    given = words[2:3] if kind == "verify" else words[2:]
    if not given or any(word.startswith(("-", "/")) for word in given):
        given = [os.path.relpath(target["script"] or ".", target.get("cwd") or ".")]
    return " ".join([kind, *(os.path.normpath(word) for word in given)])


def held_against(verdict: Verdict, path: Path, report: Report) -> Verdict:
    """The verdict with its comparison with an earlier report of the same target."""
    before, now = base_of(report["target"]), base_of(verdict.target)
    old = [finding_of(item) for item in report["findings"]]
    known = Counter(identity(f, before) for f in old if f.status == "fail")
    new: list[Finding] = []
    standing: list[Finding] = []
    for finding in (f for f in verdict.findings if f.status == "fail"):
        key = identity(finding, now)
        (standing if known[key] > 0 else new).append(finding)
        known[key] -= 1
    decided = {f.rule for f in verdict.findings if f.status in ("pass", "fail", "not_applicable")}
    decided.update(verdict.facts.get("sources", {"rules": ()})["rules"])  # where nothing is told to pass
    gone: list[Finding] = []
    unjudged: list[Finding] = []
    for finding in (f for f in old if f.status == "fail"):
        key = identity(finding, before)
        if known[key] > 0:
            (gone if finding.rule in decided else unjudged).append(finding)
            known[key] -= 1
    was_open = {f.rule for f in old if f.status == "inconclusive"}
    still = frozenset(f.rule for f in verdict.findings if f.status == "inconclusive" and f.rule in was_open)
    return replace(
        verdict, baseline=Comparison(str(path), tuple(new), tuple(standing), tuple(gone), tuple(unjudged), still)
    )


def identity(finding: Finding, base: str) -> tuple[str, ...]:
    """What a finding is known by: its rule and its place without the line, which moves with every edit above it."""
    place = finding.location
    if place is None:
        return (finding.rule,)
    return (finding.rule, _from(base, place.file), place.function, " ".join(place.code.split()))


def base_of(target: Mapping[str, Any]) -> str:
    """The folder from which the files of a report are named, whatever checkout they lie in."""
    return str(target.get("cwd", "")) if "files" in target else os.path.dirname(target["script"])  # noqa: PTH120


def _from(base: str, file: str) -> str:
    parts = PurePath(file).parts
    if "site-packages" in parts:  # a library's, wherever it is installed
        return "/".join(parts[len(parts) - parts[::-1].index("site-packages") :])
    return os.path.relpath(file or ".", base or ".").replace(os.sep, "/")


def finding_of(item: Mapping[str, Any]) -> Finding:
    """The finding of a JSON report."""
    names = (
        "rule",
        "status",
        "evidence",
        "measured",
        "limit",
        "fix",
        "consequence",
        "seconds",
        "tier",
        "required",
    )
    place = item["location"]
    return Finding(**{name: item[name] for name in names}, location=Place(**place) if place else None)
