"""The report as JUnit XML: a test suite for the target, a test case for each rule.

Follows the schema of Jenkins' xunit plugin.

An inconclusive rule is an `error`, not `skipped`, which CI systems hide. `skipped`, with the
reason, is what does not fail the gate: a failure that the baseline has, an inconclusive rule that
is not required, a rule that is not applicable or was skipped.
"""

import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence

from ..finding import Finding
from ..rules import RULES
from ..verdict import Verdict
from .limits_text import limits
from .locations import lines_of, relative
from .proved import headline
from .sanitize import in_xml
from .text import why_skipped

_FORBIDDEN = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(verdict: Verdict) -> str:
    """The whole report."""
    suite = ET.Element("testsuite")
    properties = ET.SubElement(suite, "properties")
    for name, value in _properties(verdict).items():
        ET.SubElement(properties, "property", name=name, value=_clean(value))
    _fill(suite, verdict)
    paths = {"tests": "testcase", "failures": "testcase/failure", "errors": "testcase/error"}
    numbers = {name: str(len(suite.findall(path))) for name, path in paths.items()}
    seconds = _seconds(verdict.seconds)
    suite.attrib |= {
        "name": _clean(str(verdict.target.get("command") or f"fsdp2 {verdict.target['script']}")),
        **numbers,
        "skipped": str(len(suite.findall("testcase/skipped"))),
        "time": seconds,
    }
    suites = ET.Element("testsuites", {"name": "fsdp2", **numbers, "time": seconds})
    suites.append(suite)
    ET.indent(suites)
    text = in_xml(ET.tostring(suites, encoding="unicode"))
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _properties(verdict: Verdict) -> dict[str, str]:
    """What holds for the whole suite, and the numbers of each rule."""
    values = {"verdict": verdict.verdict, "command": str(verdict.target.get("command", ""))}
    if verdict.baseline is not None:
        values |= {"baseline": verdict.baseline.path, "answer": verdict.answer}
    values |= {"tier": verdict.tier, "limits": limits(verdict)}
    values |= dict(zip(("proved", "not_covered"), headline(verdict), strict=False))
    values |= {
        name: str(verdict.environment.get(name, "")) for name in ("torch", "python", "platform")
    }
    return values | {
        f"{f.rule}.{key}": f"{value:.6g}" for f in verdict.findings for key, value in _numbers(f)
    }


def _fill(suite: ET.Element, verdict: Verdict) -> None:
    """Add the test cases."""
    names = _names(verdict.findings, verdict.linted)
    for finding, name in zip(verdict.findings, names, strict=True):
        kind = f"fsdp2.{RULES[finding.rule].family}" if finding.rule in RULES else "fsdp2"
        _result(_case(suite, name, finding.seconds, kind), finding, verdict)
    for item in verdict.skipped:
        _child(_case(suite, item["rule"]), "skipped", "skip", why_skipped(item))
    if verdict.partial:
        _child(_case(suite, "the whole verification"), "error", "inconclusive", verdict.partial)
    if suite.find("testcase") is None:  # some CI systems reject an empty suite
        nothing = f"no findings in {limits(verdict)}"
        _child(_case(suite, "the sources"), "skipped", "no_findings", nothing)


def _case(suite: ET.Element, name: str, seconds: float = 0.0, kind: str = "fsdp2") -> ET.Element:
    return ET.SubElement(
        suite, "testcase", classname=kind, name=_clean(name), time=_seconds(seconds)
    )


def _child(case: ET.Element, tag: str, kind: str, message: str) -> ET.Element:
    return ET.SubElement(case, tag, type=kind, message=_clean(message))


def _result(case: ET.Element, finding: Finding, verdict: Verdict) -> None:
    """Fill the test case."""
    numbers = (f"{key}: {value:.6g}" for key, value in _numbers(finding))
    text = _clean("\n".join(lines_of(finding, *numbers)))
    if finding.status == "pass":
        ET.SubElement(case, "system-out").text = text
        return
    tag, prefix = "error", ""
    if verdict.baseline is not None and verdict.stands(finding):
        tag, prefix = "skipped", f"known (in baseline {verdict.baseline.path}): "
    elif finding.status == "inconclusive":
        tag, prefix = (
            ("error", "not checked: ")
            if finding.required
            else ("skipped", "not checked, and not required: ")
        )
    elif finding.status in ("not_applicable", "not_covered"):
        tag, prefix = "skipped", f"{finding.status.replace('_', ' ')}: "
    elif finding.warns:
        tag, prefix = "skipped", "warning: "
    elif finding.status == "fail":
        tag = "failure"
    kind = "consequence" if finding.consequence else finding.status
    _child(case, tag, kind, prefix + finding.evidence).text = text


def _numbers(finding: Finding) -> list[tuple[str, float]]:
    pairs = (("measured", finding.measured), ("limit", finding.limit), ("margin", finding.margin))
    return [(key, value) for key, value in pairs if value is not None]


def _names(findings: Sequence[Finding], linted: bool) -> list[str]:
    """A name for each that stays the same when lines move: the rule, in lint with its place,
    counted where they are equal.
    """
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
    """Without the characters that XML 1.0 forbids."""
    return _FORBIDDEN.sub("\ufffd", text)


def _seconds(value: float) -> str:
    return f"{value:.3f}"
