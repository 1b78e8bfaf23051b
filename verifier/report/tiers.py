"""What a tier cannot show, in words: for the verdict line of every report."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from ..verdict import Verdict

SIMULATED = "one process, fake collectives; numbers, hangs and checkpoints are not checked"
MOST = 5  # calls and files that a text names


def limits(verdict: Verdict) -> str:
    """What was not looked at in this tier, in one line; "" for ranks."""
    if verdict.tier == "simulate":
        return SIMULATED
    return f"{counted(verdict.facts['sources'])}; nothing was run" if verdict.tier == "static" else ""


def verdict_line(verdict: Verdict) -> str:
    """`verdict: pass`, with the limits of its tier where nothing else qualifies it."""
    line = f"verdict: {verdict.verdict}"
    if verdict.verdict == "no_findings":
        return f"{line} in {limits(verdict)}"
    return (
        f"{line} in the simulated tier: {SIMULATED}"
        if verdict.verdict == "pass" and verdict.tier == "simulate"
        else line
    )


def counted(sources: Mapping[str, Any]) -> str:
    """How much of the sources was followed."""
    calls = sources["calls_not_followed"]
    told = f"{number(sources['functions'], 'followed function')}; {number(calls, 'call')} could not be followed"
    if sources["without_training"] and sources["files"] > 1:
        told += f"; {sources['without_training']} of {number(sources['files'], 'file')} without training"
    return told


def not_followed(verdict: Verdict) -> Iterator[str]:
    """The calls that could not be followed, and what suppressions cover; one line each."""
    sources = verdict.facts.get("sources")
    if sources is None:
        return
    for one in sources["suppressed"][:MOST]:
        yield f"suppressed {one['rule']} at {_place(one)}: {one['reason']}"
    if more := sources["suppressed"][MOST:]:
        yield f"... and {len(more)} more suppressed findings"
    for one in sources["not_followed"][:MOST]:
        times = f" ({one['calls']} calls)" if one["calls"] > 1 else ""
        yield f"not followed: {one['callee']} at {_place(one)}{times}: {one['reason']}"
    left = sources["calls_not_followed"] - sum(one["calls"] for one in sources["not_followed"][:MOST])
    if left > 0:
        yield f"... and {number(left, 'more call')}; --report json=PATH names {len(sources['not_followed'])} callees"


def number(count: int, thing: str) -> str:
    """`1 call`, `2 calls`."""
    return f"{count} {thing}{'' if count == 1 else 's'}"


def _place(one: Mapping[str, Any]) -> str:
    return f"{min(one['file'], os.path.relpath(one['file']), key=len)}:{one['line']}"
