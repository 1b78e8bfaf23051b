"""The static tier's verdict, from what the source layer saw: for paths (`fsdp2 lint`), and for one
target.
"""

import os
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..config.policy import Checkouts
from ..errors import UserError
from ..finding import Finding, Hit
from ..report.redacted import redacted
from ..source.files import files_of
from ..source.lint import Seen, look
from ..source.project import Files
from ..source.registry import DETECTORS
from ..source.suppress import RULE, problems, remarks, uses
from ..verdict import Verdict
from . import RULES
from .naming import is_named, left

MOST = 20  # calls and files that a report names
_NO_ARGS = dict.fromkeys(("args", "save_args", "resume_args", "single_args"), "")
_NOTHING_IS_RUN = {"nproc": 0, "reshard_to": [], "steps": 0, **_NO_ARGS}


def lint(
    paths: Sequence[Path],
    only: Collection[str] = (),
    skip: Collection[str] = (),
    command: str = "",
    training_required: bool = True,
    checkouts: Checkouts | None = None,
) -> Verdict:
    """The verdict on files, and on all Python files below folders: a finding for each hit.

    Raises UserError.

    Where no file holds training it is inconclusive, unless `training_required` is False.
    `checkouts`: see `look`.
    """
    started = time.monotonic()
    scripts = files_of(paths)
    files = Files(scripts)
    chosen = choose(only, skip) if only or skip else None
    target = {
        "command": command,
        "script": " ".join(map(str, paths)),
        "files": len(scripts),
        **_NOTHING_IS_RUN,
    }
    target["cwd"] = os.getcwd()  # noqa: PTH109
    # Those to start from come first: what they import is followed in full from there.
    scripts.sort(key=lambda path: "__main__" not in files.text(path))
    seen = look(scripts, chosen, files, checkouts=checkouts)
    return redacted(_verdict(target, seen, chosen, training_required, started))


def verdict_on(
    target: dict[str, Any],
    script: Path,
    chosen: Collection[str],
    checkouts: Checkouts | None = None,
) -> Verdict:
    """The verdict on one target: a finding for each hit."""
    started = time.monotonic()
    seen = look([script], chosen, checkouts=checkouts)
    return _verdict(target, seen, chosen, True, started)


def _verdict(
    target: dict[str, Any],
    seen: Seen,
    chosen: Collection[str] | None,
    training_required: bool,
    started: float,
) -> Verdict:
    environment = {
        "torch": "not imported",
        "python": sys.version.split()[0],
        "platform": sys.platform,
    }
    findings = findings_of(seen, chosen)
    facts = {"sources": {**_sources(seen, chosen), "training_required": training_required}}
    verdict = Verdict(
        "inconclusive", target, environment, (), findings, facts, seconds=time.monotonic() - started
    )
    verdict = replace(verdict, verdict=verdict.of(findings))
    return verdict.remarked(remarks(seen.suppressions))


def _sources(seen: Seen, chosen: Collection[str] | None) -> dict[str, Any]:
    """What a report says of the sources: what was looked for, what was followed, and what was
    not.
    """
    cover = seen.coverage
    return {
        "rules": [name for name in (*DETECTORS, RULE) if chosen is None or name in chosen],
        "files": len(cover.files),
        "functions": cover.functions,
        "calls_not_followed": cover.calls_missed,
        "not_followed": [asdict(one) for one in cover.missed[:MOST]],
        "without_training": len(cover.without_training),
        "files_without_training": [str(path) for path in cover.without_training[:MOST]],
        "suppressed": [
            {
                "rule": hit.rule,
                "file": hit.location.file,
                "line": hit.location.line,
                "reason": one.reason,
            }
            for hit, one in seen.hidden
        ],
    }


def findings_of(seen: Seen, chosen: Collection[str] | None) -> list[Finding]:
    """A finding for each hit of a known rule, with the fix of that rule."""
    return [
        replace(RULES[hit.rule].failed(hit.message, hit.location), tier="static")
        for hit in [*seen.hits, *_misused(seen, chosen)]
        if hit.rule in RULES and (chosen is None or hit.rule in chosen)
    ]


def _misused(seen: Seen, chosen: Collection[str] | None) -> list[Hit]:
    """The hits of the rule on suppressions itself."""
    if not seen.suppressions:
        return []
    judged = set(DETECTORS) if chosen is None else set(DETECTORS) & set(chosen)
    used = uses(seen.suppressions, ((hit.rule, hit.location) for hit, _ in seen.hidden))
    return list(problems(seen.suppressions, RULES, judged, used))


def choose(only: Collection[str], skip: Collection[str]) -> list[str]:
    """The names of the rules with a detector that two lists of rules or families leave.

    Raises UserError.
    """
    able = [name for name in RULES if name in DETECTORS or name == RULE]
    found = left(able, only, skip)
    for name in only:
        if not any(is_named(rule, [name]) for rule in able):
            raise UserError(f"'{name}' cannot be seen in sources alone: `fsdp2 verify` judges it")
    return found
