"""The report as SARIF 2.1.0 (OASIS): what failed, what is inconclusive, and the docs of their
rules. What passed is left out.

Rules that do not apply are in the property bag of the run. Results of kind "notApplicable" would be
alerts: GitHub code scanning reads no `kind` and takes every result for a failure.

Of the specification: 3.27.9 `kind` and 3.27.10 `level` ("none" where kind is not "fail"), 3.27.24
`baselineState` (on all results or on none), 3.14.14 `originalUriBaseIds` (without a URI, so that
the same report comes out in every checkout).
"""

import hashlib
import json
import math
import os
from typing import Any
from urllib.parse import quote

from ... import __version__
from ..config.commands import explain
from ..finding import Finding
from ..rules import RULES
from ..rules.base import Rule
from ..trace.events import Line
from ..verdict import Verdict
from .baseline import base_of, identity, name_of
from .limits_text import limits
from .locations import place_of, relative
from .proved import headline
from .rule_page import markdown
from .sanitize import in_json

BASE = "SRCROOT"
SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"  # a name: nothing is fetched
LONGEST = 1000  # characters of a description; GitHub takes 1024


def render(verdict: Verdict) -> str:
    """The whole report."""
    held = verdict.baseline
    quiet = ("pass", "not_covered", "not_applicable")
    reported = [f for f in verdict.findings if f.status not in quiet]
    judged_by = {
        "tier": verdict.tier,
        "limits": limits(verdict),
        "headline": headline(verdict),
        "notCovered": _reasons(verdict, "not_covered"),
        "notApplicable": _reasons(verdict, "not_applicable"),
    }
    rules = list(dict.fromkeys(f.rule for f in (*reported, *(held.gone if held else ()))))
    results = [_result(f, verdict, rules) for f in reported]
    absent = {"baselineState": "absent", "kind": "pass", "level": "none"}
    results += [
        {**_result(f, verdict, rules), **absent} for f in (held.gone if held is not None else ())
    ]
    invocation: dict[str, Any] = {
        "commandLine": str(verdict.target.get("command", "")),
        "executionSuccessful": verdict.verdict != "error" and not verdict.partial,
        "exitCode": verdict.exit_code,
    }
    if verdict.partial:
        invocation["toolExecutionNotifications"] = [
            {"level": "error", "message": {"text": verdict.partial}}
        ]
    driver = {"name": "fsdp2", "fullName": "verified-fsdp2", "semanticVersion": __version__}
    run = {
        "tool": {"driver": {**driver, "rules": [_rule(name) for name in rules]}},
        "automationDetails": {"id": f"fsdp2 {name_of(verdict.target)}/"},
        "invocations": [invocation],
        "originalUriBaseIds": {BASE: {"description": {"text": "The root of the checkout."}}},
        "results": results,
        "properties": {"skipped": list(verdict.skipped), **judged_by},
    }
    return (
        in_json(json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)) + "\n"
    )


def _reasons(verdict: Verdict, status: str) -> list[dict[str, str]]:
    found = (f for f in verdict.findings if f.status == status)
    return [{"rule": f.rule, "reason": f.evidence} for f in found]


def _rule(name: str) -> dict[str, Any]:
    rule: Rule | None = RULES.get(name)
    if rule is None:
        return {"id": name}
    page = {key: " ".join(text.split()) for key, text in rule.page().items()}
    return {
        "id": name,
        "shortDescription": {"text": page["Statement"][:LONGEST]},
        "fullDescription": {
            "text": f"{page['Statement']} {page['Why'][0].upper()}{page['Why'][1:]}"[:LONGEST]
        },
        "help": {"text": f"{page['Fix']} Docs: {explain(name)}", "markdown": markdown(rule)},
        "defaultConfiguration": {"level": "error"},
        "properties": {"tags": ["fsdp2", rule.family]},
    }


def _result(finding: Finding, verdict: Verdict, rules: list[str]) -> dict[str, Any]:
    message = finding.evidence
    if finding.status == "inconclusive":
        kind, level, message = "open", "none", f"not checked: {message}"
    else:
        kind, level = "fail", "warning" if finding.consequence or finding.warns else "error"
    if finding.fix:
        message += f"\n\nFix: {finding.fix}"
    key = "\n".join(identity(finding, base_of(verdict.target)))
    held = verdict.baseline
    still_open = (
        held is not None and finding.status == "inconclusive" and finding.rule in held.still_open
    )
    known = "unchanged" if verdict.stands(finding) or still_open else "new"
    state = {"baselineState": known} if held is not None else {}
    numbers = (("measured", finding.measured), ("limit", finding.limit))
    bag = {name: value for name, value in numbers if value is not None and math.isfinite(value)}
    return {
        "ruleId": finding.rule,
        "ruleIndex": rules.index(finding.rule),
        "kind": kind,
        "level": level,
        "message": {"text": message.replace("](", "] (")},  # a link otherwise
        "locations": [_location(place_of(finding, verdict))],
        **_related(finding),
        "partialFingerprints": {
            "fsdp2Identity/v1": hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()
        },
        **state,
        "properties": {"tier": finding.tier, "consequence": finding.consequence, **bag},
    }


def _related(finding: Finding) -> dict[str, Any]:
    """The line of a library to which the user's line led, at which a code scanning service can show
    nothing.
    """
    inner = finding.location.library if finding.location else None
    return (
        {"relatedLocations": [{**_location(inner), "message": {"text": "in the library"}}]}
        if inner
        else {}
    )


def _location(place: Line) -> dict[str, Any]:
    file = relative(place.file)
    if file is not None:
        artifact = {"uri": _quoted(file), "uriBaseId": BASE}
    else:
        artifact = {"uri": f"file://{_quoted(os.path.abspath(place.file))}"}  # noqa: PTH100
    region: dict[str, Any] = {"startLine": max(int(place.line), 1)}
    if place.code:
        region["snippet"] = {"text": place.code}
    found: dict[str, Any] = {"physicalLocation": {"artifactLocation": artifact, "region": region}}
    if place.function:
        found["logicalLocations"] = [{"name": place.function, "kind": "function"}]
    return found


def _quoted(path: str) -> str:
    """Percent-encoded, whatever bytes a file's name has."""
    try:
        return quote(os.fsencode(path))
    except UnicodeEncodeError:
        return quote(path.encode("utf-8", "replace"))
