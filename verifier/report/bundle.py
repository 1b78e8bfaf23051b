"""What a maintainer needs to judge a finding, from a JSON report: without code, paths, secrets."""

from typing import Any

from ..rules import RULES
from .redacted import redacted
from .without_code import private_words, without_code, words

_RUN = ("role", "world_size", "completed", "exit", "losses", "grad_norms")
_FINDING = (
    *("rule", "status", "tier", "consequence", "required", "measured", "limit", "margin"),
    *("evidence", "fix"),
)
_TARGET = ("nproc", "reshard_to", "steps")


def bundle(report: dict[str, Any], finding: dict[str, Any]) -> dict[str, Any]:
    """One finding with the runs and versions that it comes from. Raises RecursionError."""
    others = (one for one in report["findings"] if one is not finding)
    failed = [one["rule"] for one in others if one["status"] in ("fail", "error")]
    report, finding = redacted(report), redacted(finding)
    place = finding.get("location") or {}
    target = report["target"]
    options = {word.split("=")[0] for word in words(target) if word.startswith("-")}
    found = {
        "environment": _environment(report["environment"]),
        "finding": {
            **{key: finding[key] for key in _FINDING if key in finding},
            "line": place.get("line"),
            "function": place.get("function"),
        },
        "verdict": report["verdict"],
        "other_failures": failed,
        "counts": report["counts"],
        **{key: target.get(key) for key in _TARGET},
        "options": sorted(options),
        "runs": [{key: run.get(key) for key in _RUN} for run in report["runs"]],
    }
    kept: dict[str, Any] = _without(found, private_words(report), _own_texts(finding))
    return kept


def _environment(environment: dict[str, Any]) -> dict[str, Any]:
    """`--launcher` may name the machines, or be a command: only its kind is kept."""
    launcher = str(environment.get("launcher", "")).partition(":")[0]
    kind = launcher if launcher.isidentifier() else "command"
    return environment | ({"launcher": kind} if "launcher" in environment else {})


def _own_texts(finding: dict[str, Any]) -> set[str]:
    """The fix of a rule is a text of ours, with the code that it recommends."""
    rule = RULES.get(finding["rule"])
    return {" ".join(rule.page().get("Fix", "").split())} if rule is not None else set()


def _without(value: Any, private: list[str], own: set[str]) -> Any:
    if isinstance(value, str):
        return value if value in own else without_code(value, private)
    if isinstance(value, dict):
        pairs = value.items()
        return {_without(key, private, own): _without(one, private, own) for key, one in pairs}
    if isinstance(value, list | tuple):
        return [_without(one, private, own) for one in value]
    return value
