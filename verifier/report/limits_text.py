"""What a tier cannot show: for the verdict line of every report."""

from collections.abc import Iterator, Mapping
from typing import Any

from ..analysis.wording import count
from ..config.policy import BY_QUICK
from ..verdict import Verdict
from .locations import shortest
from .wrapping import wrapped

SIMULATED = "one process, fake collectives; numbers, hangs and checkpoints are not checked"
MOST = 5  # calls and suppressed findings that a text names


def limits(verdict: Verdict) -> str:
    """What this tier did not check, in one line; "" for ranks."""
    if verdict.tier == "simulate":
        return SIMULATED
    return (
        f"{counted(verdict.facts['sources'])}; nothing was run" if verdict.tier == "static" else ""
    )


def verdict_line(verdict: Verdict) -> str:
    """`verdict: pass`, with the limits of its tier where nothing else qualifies it."""
    line = f"verdict: {verdict.verdict}"
    if verdict.verdict == "no_findings":
        return f"{line} in {limits(verdict)}"
    if verdict.verdict == "pass" and (
        left := sum(item["reason"] == BY_QUICK for item in verdict.skipped)
    ):
        return f"{line} with --quick: {count(left, 'rule')} that other runs decide not judged"
    simulated = verdict.verdict == "pass" and verdict.tier == "simulate"
    return f"{line} in the simulated tier: {SIMULATED}" if simulated else line


def counted(sources: Mapping[str, Any]) -> str:
    """How much of the sources was followed."""
    calls = count(sources["calls_not_followed"], "call")
    text = f"{count(sources['functions'], 'followed function')}; {calls} could not be followed"
    if sources["without_training"] and sources["files"] > 1:
        text += (
            f"; {sources['without_training']} of {count(sources['files'], 'file')} without training"
        )
    return text


def not_followed(verdict: Verdict, verbose: bool = False) -> Iterator[str]:
    """Suppressed findings, then the calls that could not be followed: MOST of each, all of them
    with `verbose`.
    """
    sources = verdict.facts.get(
        "sources", {"suppressed": (), "not_followed": (), "calls_not_followed": 0}
    )
    suppressed, calls = (
        sources[key][: None if verbose else MOST] for key in ("suppressed", "not_followed")
    )
    for one in suppressed:
        yield from wrapped(
            f"suppressed {one['rule']} at {_place(one)}: {one['reason']}", further="  "
        )
    if more := len(sources["suppressed"]) - len(suppressed):
        yield f"... and {count(more, 'more suppressed finding')}; -v lists them"
    for one in calls:
        times = f" ({one['calls']} calls)" if one["calls"] > 1 else ""
        yield from wrapped(
            f"not followed: {one['callee']} at {_place(one)}{times}: {one['reason']}", further="  "
        )
    if (left := sources["calls_not_followed"] - sum(one["calls"] for one in calls)) > 0:
        yield (
            f"... and {count(left, 'more call')}; -v lists"
            f" {count(len(sources['not_followed']), 'callee')}"
        )


def _place(one: Mapping[str, Any]) -> str:
    return f"{shortest(one['file'])}:{one['line']}"
