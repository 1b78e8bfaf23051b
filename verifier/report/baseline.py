"""A verdict compared with an earlier JSON report: which failures are new, known or gone.

Only new ones fail a gate.

A failure whose rule is no longer applicable is gone.
"""

import gc
import json
import os
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, cast, get_args

from ..analysis.wording import count
from ..config.policy import Checkouts
from ..config.reading import inputs
from ..errors import UserError
from ..finding import Finding, Remark, Status
from ..trace.events import Place
from ..verdict import Comparison, Verdict
from .json_report import SCHEMA
from .redacted import redacted

# earlier versions whose failures are read; roles and statuses changed since, failures did not
READABLE = (1, 2)
_TEXT = {"type": "string"}
_LINE = {
    "type": "object",
    "required": ["file", "line", "function", "code"],
    "properties": {"file": _TEXT, "line": {"type": "integer"}, "function": _TEXT, "code": _TEXT},
}
# What a comparison reads of a report, and no more: fields that a report gains or loses beside these
# leave every stored baseline as good as it was.
_NEEDED = {
    "required": ["target", "findings"],
    "properties": {
        "target": {
            "type": "object",
            "required": ["script"],
            "properties": dict.fromkeys(("script", "command", "module", "cwd"), _TEXT),
        },
        "findings": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["rule", "status", "evidence"],
                "properties": {
                    "rule": _TEXT,
                    "status": {"enum": list(get_args(Status))},
                    "evidence": _TEXT,
                    "location": {**_LINE, "type": ["object", "null"]},
                },
            },
        },
    },
}
_ERRORS = 100  # of which the clearest is shown
_AGAIN = "write one with --report json=PATH"

Report = dict[str, Any]


def load(path: Path, option: str = "--baseline ") -> Report:
    """The report in a file.

    Raises UserError if it is not a report of a version in READABLE or of this one.

    `option`: how the file was given, for messages.
    """
    collects = gc.isenabled()
    try:
        text = inputs.text(path, inputs.REPORT)
        gc.disable()  # which would look at all that is there again and again
        report = json.loads(text)
    except FileNotFoundError:
        raise UserError(f"{option}{path}: no such file; {_AGAIN}") from None
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{option}{path}: cannot be read: {reason}; {_AGAIN}") from None
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}:{error.lineno}:{error.colno}: not JSON ({error.msg.removesuffix(' at')});"
            f" {_AGAIN}"
        ) from None
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        raise UserError(f"{path}:1:1: not JSON: {error}; {_AGAIN}") from None
    finally:
        if collects:
            gc.enable()
    try:
        _must_be_ours(path, report)
        # a verdict that it is compared with holds no secrets either
        return cast(Report, redacted(report))
    except RecursionError:
        raise UserError(f"{path}:1:1: not a report of fsdp2: nested too deeply; {_AGAIN}") from None


def _must_be_ours(path: Path, report: Any) -> None:
    from jsonschema import Draft7Validator
    from jsonschema.exceptions import best_match

    read = (*READABLE, SCHEMA)
    if not isinstance(report, dict) or "schema" not in report:
        raise UserError(f"{path}:1:1: not a report of fsdp2; {_AGAIN}")
    if report["schema"] not in read:
        known = f"this program reads {' and '.join(map(str, read))}"
        raise UserError(
            f"{path}:1:1: the report has schema version {report['schema']!r}, {known}; {_AGAIN}"
        )
    error = best_match(islice(Draft7Validator(_NEEDED).iter_errors(report), _ERRORS))
    if error is not None:
        place = ".".join(map(str, error.absolute_path)) or "the report"
        raise UserError(
            f"{path}:1:1: not a report of fsdp2: {place}: {error.message[:200]}; {_AGAIN}"
        )


def must_be_of(path: Path, report: Report, target: Mapping[str, Any]) -> None:
    """Raises UserError if the report is of another target than this one."""
    old, new = name_of(report["target"]), name_of(target)
    if old != new and report["target"]["script"] != target["script"]:
        raise UserError(
            f"--baseline {path}: a report on {old}, not on {new}; give the report of the same"
            " target"
        )


def name_of(target: Mapping[str, Any]) -> str:
    """The target as named on the command line, the same in every checkout."""
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


def held_against(
    verdict: Verdict, path: Path, report: Report, checkouts: Checkouts | None = None
) -> Verdict:
    """The verdict with its comparison to an earlier report of the same target.

    `checkouts`: where the base branch lies, whose report must know a failure, too.
    """
    remarks = list[Remark]()
    if checkouts is not None:
        report, remarks = _bounded(report, path, checkouts)
    before, now = base_of(report["target"]), base_of(verdict.target)
    old = [finding_of(item) for item in report["findings"]]
    known = Counter(identity(f, before) for f in old if f.status == "fail")
    new, standing, gone, unjudged = (list[Finding]() for _ in range(4))
    for finding in (f for f in verdict.findings if f.status == "fail"):
        key = identity(finding, now)
        (standing if known[key] > 0 else new).append(finding)
        known[key] -= 1
    judged = {f.rule for f in verdict.findings if f.status in ("pass", "fail", "not_applicable")}
    judged.update(
        verdict.facts.get("sources", {"rules": ()})["rules"]
    )  # a static tier reports no passes
    for finding in (f for f in old if f.status == "fail"):
        key = identity(finding, before)
        if known[key] > 0:
            (gone if finding.rule in judged else unjudged).append(finding)
            known[key] -= 1
    was_open = {f.rule for f in old if f.status == "inconclusive"}
    still = frozenset(
        f.rule for f in verdict.findings if f.status == "inconclusive" and f.rule in was_open
    )
    held = Comparison(str(path), tuple(new), tuple(standing), tuple(gone), tuple(unjudged), still)
    return replace(verdict, baseline=held).remarked(remarks)


def _bounded(report: Report, path: Path, checkouts: Checkouts) -> tuple[Report, list[Remark]]:
    """An earlier report with those failures alone that the base branch's has, too, and what to say
    of the others.
    """
    if path.resolve().is_relative_to(checkouts.base):
        return report, []
    before = checkouts.before(path)
    try:
        base = load(before) if before is not None else None
    except UserError:
        base = None
    known = Counter(key for key, _ in _failures(base)) if base is not None else Counter()
    refused = []
    for key, item in _failures(report):
        refused += [item] if known[key] <= 0 else []
        known[key] -= 1
    if not refused:
        return report, []
    found = [item for item in report["findings"] if not any(item is one for one in refused)]
    text = f"baseline {path}: {count(len(refused), 'failure')} not in that of the base branch"
    return {**report, "findings": found}, [Remark(f"{text}, and not taken as known")]


def _failures(report: Report) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """Each failure of a report, with what identifies it."""
    base = base_of(report["target"])
    for item in report["findings"]:
        if item["status"] == "fail":
            yield identity(finding_of(item), base), item


def identity(finding: Finding, base: str) -> tuple[str, ...]:
    """What identifies a finding: its rule and its place without the line, which moves with every
    edit above it.
    """
    place = finding.location
    if place is None:
        return (finding.rule,)
    return (finding.rule, _from(base, place.file), place.function, " ".join(place.code.split()))


def base_of(target: Mapping[str, Any]) -> str:
    """The folder to which the files of a report are relative, in any checkout."""
    return str(target.get("cwd", "")) if "files" in target else os.path.dirname(target["script"])  # noqa: PTH120


def _from(base: str, file: str) -> str:
    parts = PurePath(file).parts
    if "site-packages" in parts:  # of a library, wherever it is installed
        return "/".join(parts[len(parts) - parts[::-1].index("site-packages") :])
    return os.path.relpath(file or ".", base or ".").replace(os.sep, "/")


def finding_of(item: Mapping[str, Any]) -> Finding:
    """The finding of a JSON report."""
    names = [field.name for field in fields(Finding) if field.name in item]
    known = {name: item[name] for name in names if name not in ("location", "suspicion")}
    place = item.get("location")
    if place and (user := place.get("from")):  # in a library
        library = {name: place[name] for name in _LINE["required"]}
        place = {**user, "library": library, "through": place.get("through", [])}
    return Finding(**known, location=Place.from_json(_known(place)) if place else None)


def _known(place: Mapping[str, Any]) -> dict[str, Any]:
    """What this version knows of a location."""
    return {name: place[name] for name in Place.__dataclass_fields__ if name in place}
