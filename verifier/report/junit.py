"""The report as JUnit XML: a test suite for the target, a test case for each rule. Follows the schema of Jenkins' xunit plugin.

An inconclusive rule is an `error`, not `skipped`: CI systems show what is skipped as no reason to look. What does not fail the gate is
`skipped`, with the reason: a failure that stands in the baseline, a rule that is open and not required, one that does not apply, or one
that is not judged.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence

from ..finding import Finding
from ..rules import RULES
from ..verdict import Verdict
from .places import relative, where
from .sanitize import in_xml
from .text import why_skipped
from .tiers import limits

_FORBIDDEN = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(verdict: Verdict) -> str:
    """The whole report."""
    linted = verdict.linted
    suite = ET.Element("testsuite")
    properties = ET.SubElement(suite, "properties")
    told = {"verdict": verdict.verdict, "command": str(verdict.target.get("command", ""))}
    if verdict.baseline is not None:
        told |= {"baseline": verdict.baseline.path, "answer": verdict.answer}
    told |= {"tier": verdict.tier, "limits": limits(verdict)}
    told |= {name: str(verdict.environment.get(name, "")) for name in ("torch", "python", "platform")}
    told |= {f"{f.rule}.{key}": f"{value:.6g}" for f in verdict.findings for key, value in _numbers(f)}
    for name, value in told.items():
        ET.SubElement(properties, "property", name=name, value=_clean(value))
    counts: Counter[str] = Counter()
    for finding, name in zip(verdict.findings, _names(verdict.findings, linted), strict=True):
        kind = f"fsdp2.{RULES[finding.rule].family}" if finding.rule in RULES else "fsdp2"
        case = ET.SubElement(suite, "testcase", classname=kind, name=_clean(name), time=_seconds(finding.seconds))
        counts[_result(case, finding, verdict)] += 1
    for item in verdict.skipped:
        case = ET.SubElement(suite, "testcase", classname="fsdp2", name=_clean(item["rule"]), time="0.000")
        ET.SubElement(case, "skipped", type="skip", message=_clean(why_skipped(item)))
        counts["skipped"] += 1
    if verdict.partial:
        case = ET.SubElement(suite, "testcase", classname="fsdp2", name="the whole verification", time="0.000")
        ET.SubElement(case, "error", type="inconclusive", message=_clean(verdict.partial))
        counts["error"] += 1
    if suite.find("testcase") is None:  # an empty suite is an error to some
        case = ET.SubElement(suite, "testcase", classname="fsdp2", name="the sources", time="0.000")
        ET.SubElement(case, "skipped", type="no_findings", message=_clean(f"no findings in {limits(verdict)}"))
        counts["skipped"] += 1
    numbers = {"tests": str(len(suite.findall("testcase")))}
    numbers |= {"failures": str(counts["failure"]), "errors": str(counts["error"])}
    title = _clean(told["command"] or f"fsdp2 {verdict.target['script']}")
    suite.attrib |= {"name": title, **numbers, "skipped": str(counts["skipped"]), "time": _seconds(verdict.seconds)}
    suites = ET.Element("testsuites", {"name": "fsdp2", **numbers, "time": _seconds(verdict.seconds)})
    suites.append(suite)
    ET.indent(suites)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{in_xml(ET.tostring(suites, encoding="unicode"))}\n'


def _result(case: ET.Element, finding: Finding, verdict: Verdict) -> str:
    """Fill the test case; the kind of its result."""
    if finding.status == "pass":
        ET.SubElement(case, "system-out").text = _clean("\n".join(_lines(finding)))
        return "pass"
    message = finding.evidence
    if verdict.baseline is not None and verdict.stands(finding):
        kind, message = "skipped", f"known and not fixed: it stands in {verdict.baseline.path}: {message}"
    elif finding.status == "inconclusive" and not finding.required:
        kind, message = "skipped", f"not checked, and not required: {message}"
    elif finding.status == "not_applicable":
        kind, message = "skipped", f"not applicable: {message}"
    elif finding.status == "fail":
        kind = "failure"
    else:
        kind = "error"
        message = f"not checked: {message}" if finding.status == "inconclusive" else message
    what = "consequence" if finding.consequence else finding.status
    element = ET.SubElement(case, kind, type=what, message=_clean(message))
    element.text = _clean("\n".join(_lines(finding)))
    return kind


def _lines(finding: Finding) -> list[str]:
    """What a reader of one test case needs."""
    lines = [finding.evidence, *(f"{key}: {value:.6g}" for key, value in _numbers(finding))]
    if finding.location:
        lines += [f"at {where(finding.location)}", f"    {finding.location.code}"]
    if finding.fix:
        lines.append(f"fix: {finding.fix}")
    return [*lines, f"fsdp2 explain {finding.rule}"]


def _numbers(finding: Finding) -> list[tuple[str, float]]:
    pairs = (("measured", finding.measured), ("limit", finding.limit), ("margin", finding.margin))
    return [(key, value) for key, value in pairs if value is not None]


def _names(findings: Sequence[Finding], linted: bool) -> list[str]:
    """A name for each that stays the same when lines move: the rule, in lint with its place, counted where they are equal."""
    names: list[str] = []
    seen: Counter[str] = Counter()
    for finding in findings:
        name = finding.rule
        if linted and finding.location:
            file = finding.location.file
            name = f"{name} in {relative(file) or file} {finding.location.function}".rstrip()
        seen[name] += 1
        names.append(f"{name} ({seen[name]})" if seen[name] > 1 else name)
    return names


def _clean(text: str) -> str:
    """Without the characters that XML 1.0 has no place for."""
    return _FORBIDDEN.sub("\ufffd", text)


def _seconds(value: float) -> str:
    return f"{value:.3f}"
