"""The stable machine-readable report; its schema is `report.schema.json` beside this file."""

import math
import re
from dataclasses import replace
from typing import Any, get_args

from ..config.commands import explain
from ..finding import Finding, Status
from ..trace.events import Place
from ..verdict import Verdict
from .actions import next_steps, not_covered
from .limits_text import limits
from .proved import headline
from .sanitize import in_json

SCHEMA = 3  # another one only where a field of an earlier report goes, or means something else
STATUSES: tuple[Status, ...] = get_args(Status)
_FLAT_LIST = re.compile(r"\[\n\s+([^\[\]{}]*?)\n\s+\]")  # strings hold no line breaks in JSON
_BREAK = re.compile(r"\n\s+")


def as_dict(verdict: Verdict) -> dict[str, Any]:
    """The report as plain data. Numbers that are not finite become None."""
    report: dict[str, Any] = _finite(
        {
            "schema": SCHEMA,
            "verdict": verdict.verdict,
            "headline": headline(verdict),
            "tier": verdict.tier,
            "limits": limits(verdict),
            "counts": {one: verdict.counts.get(one, 0) for one in (*STATUSES, "warning")},
            "target": verdict.target,
            "environment": verdict.environment,
            "next": next_steps(verdict),
            "not_covered": not_covered(verdict),
            "findings": [_finding(f) for f in verdict.findings],
            "skipped": list(verdict.skipped),
            "runs": list(verdict.runs),
            "facts": verdict.facts,
            "seconds": round(verdict.seconds, 3),
            **{
                name: reason
                for name in ("interrupted", "refused", "suggestion")
                if (reason := getattr(verdict, name))
            },
            **_baseline(verdict),
        }
    )
    return report


def render(verdict: Verdict) -> str:
    """The report as JSON text."""
    import json

    text = in_json(json.dumps(as_dict(verdict), indent=2, allow_nan=False)) + "\n"
    return _FLAT_LIST.sub(lambda found: f"[{_BREAK.sub(' ', found[1])}]", text)


def _baseline(verdict: Verdict) -> dict[str, Any]:
    held = verdict.baseline
    if held is None:
        return {}
    places = {
        name: [{"rule": f.rule, "location": _location(f.location)} for f in getattr(held, name)]
        for name in ("new", "standing", "gone", "unjudged")
    }
    return {"baseline": {"path": held.path, "verdict": verdict.answer, **places}}


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        **{
            name: getattr(finding, name)
            for name in ("rule", "status", "tier", "consequence", "required")
        },
        "severity": severity(finding),
        "part": finding.part,
        **{name: getattr(finding, name) for name in ("measured", "limit", "margin", "evidence")},
        "location": _location(finding.location),
        "fix": finding.fix,
        "explain": explain(finding.rule),
        "seconds": round(finding.seconds, 6),
    }


def severity(finding: Finding) -> str | None:
    """ "error" for what decides, "warning" for a failure that does not; None where nothing
    failed.
    """
    if finding.status not in ("fail", "error"):
        return None
    return "warning" if finding.warns else "error"


def _location(place: Place | None) -> dict[str, Any] | None:
    """The line of a finding; of one in a library, with the lines on the way, and the user's line
    that led there.
    """
    if place is None or place.library is None:
        return place.to_json() if place else None
    through = {"through": [line.to_json() for line in place.through]} if place.through else {}
    return {
        **place.library.to_json(),
        **through,
        "from": replace(place, library=None, through=[]).to_json(),
    }


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
