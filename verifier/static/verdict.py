"""The static tier's answer: for paths (`fsdp2 lint`), for one target, and beside the runs of a full verification."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..finding import Finding, Hit
from ..verdict import Verdict, verdict_of
from .detectors import DETECTORS
from .lint import look
from .project import Module, parse
from .suppress import RULE, Suppression, problems

_LEFT_OUT = ("__pycache__", "node_modules", "site-packages")


def lint(paths: Sequence[Path], only: Collection[str] = (), skip: Collection[str] = (), command: str = "") -> Verdict:
    """The verdict on files, and on all Python files below folders: a finding for each hit. Raises UserError."""
    started = time.monotonic()
    scripts = files_of(paths)
    parsed: dict[Path, Module | None] = {path: parse(path) for path in scripts}
    chosen = choose(only, skip) if only or skip else None
    seen = look(scripts, chosen, parsed)
    hits = [*seen.hits, *_misused(seen.suppressions, chosen)]
    findings = _findings(hits, chosen)
    target = {"command": command, "script": " ".join(map(str, paths)), "files": len(scripts), **_NOTHING_IS_RUN}
    target["cwd"] = os.getcwd()  # noqa: PTH109
    return _verdict(target, findings, started)


def verdict_on(target: dict[str, Any], script: Path, chosen: Collection[str]) -> Verdict:
    """The verdict on one target: a finding for each hit, and a pass for each chosen rule that has a detector and no hit."""
    started = time.monotonic()
    seen = look([script], chosen)
    findings = _findings([*seen.hits, *_misused(seen.suppressions, chosen)], chosen)
    failed = {f.rule for f in findings}
    hidden = {hit.rule: cover for hit, cover in seen.hidden}
    for name in chosen:
        if name in failed:
            continue
        told = hidden[name].told() if name in hidden else "not seen in the sources"
        findings.append(Finding(name, "pass", told, tier="static"))
    return _verdict(target, findings, started)


_NOTHING_IS_RUN = {
    "nproc": 0,
    "reshard_to": [],
    "steps": 0,
    "args": "",
    "save_args": "",
    "resume_args": "",
    "single_args": "",
}


def _verdict(target: dict[str, Any], findings: list[Finding], started: float) -> Verdict:
    environment = {"torch": "not imported", "python": sys.version.split()[0], "platform": sys.platform}
    seconds = time.monotonic() - started
    return Verdict(verdict_of(findings), target, environment, (), findings, seconds=seconds)


def _findings(hits: Sequence[Hit], chosen: Collection[str] | None) -> list[Finding]:
    """A finding for each hit, with the mend of its rule's page. A hit whose rule is not there is none."""
    if not hits:
        return []
    from ..rules import RULES

    return [
        replace(RULES[hit.rule].failed(hit.told, hit.location), tier="static")
        for hit in hits
        if hit.rule in RULES and (chosen is None or hit.rule in chosen)
    ]


def _misused(suppressions: Sequence[Suppression], chosen: Collection[str] | None) -> list[Hit]:
    """The hits of the rule on suppressions itself."""
    if not suppressions:
        return []
    from ..rules import RULES

    judged = set(DETECTORS) if chosen is None else set(DETECTORS) & set(chosen)
    return list(problems(suppressions, RULES, judged))


def choose(only: Collection[str], skip: Collection[str]) -> list[str]:
    """The names of the rules with a detector that two lists of rules or families leave. Raises UserError."""
    from ..rules import RULES
    from ..rules.naming import is_named, left

    able = [name for name in RULES if name in DETECTORS or name == RULE]
    found = left(able, only, skip)
    for name in only:
        if not any(is_named(rule, [name]) for rule in able):
            raise UserError(f"'{name}' cannot be seen in sources alone; `fsdp2 verify` judges it")
    return found


def files_of(paths: Sequence[Path]) -> list[Path]:
    """The files themselves, and the Python files below the folders, sorted, each once. Raises UserError."""
    found: dict[Path, None] = {}
    for path in paths:
        whole = Path(os.path.abspath(path))  # noqa: PTH100 - a link keeps its name
        if whole.is_dir():
            below = list(_python_files(whole))
            if not below:
                raise UserError(f"{path}: no Python file in this folder")
            found |= dict.fromkeys(below)
        elif whole.exists():
            found[whole] = None
        else:
            raise UserError(f"{path}: no such file or folder")
    return list(found)


def _python_files(folder: Path) -> Iterator[Path]:
    """Sorted; hidden folders and virtual environments are left out."""
    for place, folders, names in os.walk(folder):
        here = Path(place)
        folders[:] = sorted(
            n
            for n in folders
            if not n.startswith(".") and n not in _LEFT_OUT and not (here / n / "pyvenv.cfg").is_file()
        )
        yield from (here / name for name in sorted(names) if name.endswith(".py") and not name.startswith("."))


def settled(finding: Finding, suppressions: Sequence[Suppression]) -> Finding:
    """The finding; a pass that says so if a suppression covers its place."""
    if finding.status == "fail":
        for one in suppressions:
            if one.covers(finding.rule, finding.location):
                one.used.add(finding.rule)
                return replace(finding, status="pass", evidence=one.told(), fix=None)
    return finding
