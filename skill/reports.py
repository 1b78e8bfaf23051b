"""The destinations of reports: `--report FORMAT[=PATH]`, several at once."""

from __future__ import annotations

import argparse
import errno
import os
import select
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from ..verifier.config.reading import inputs
from ..verifier.errors import UserError
from ..verifier.report.known import may_be_replaced
from ..verifier.verdict import Verdict
from .output import log, say

Report = tuple[str, Path | None]
T = TypeVar("T")
PLACE = "{target}"
PATIENCE = 60.0  # seconds without a reader of what is written to a pipe
LINES = ("text", "github")  # formats of which several reports may share stdout
FORMATS = ("text", "json", "html", "junit", "sarif", "github")
HELP = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}, to stdout or a file (repeatable)"


def add_options(parser: argparse.ArgumentParser, report: str, baseline: str) -> None:
    """The options of every command that judges: which rules, which reports.

    `report` and `baseline` are their help.
    """
    add = parser.add_argument
    add(
        "--only",
        metavar="RULE",
        action="extend",
        type=names,
        default=[],
        help="judge this rule or family only (repeatable; also A,B)",
    )
    add(
        "--skip",
        metavar="RULE",
        action="extend",
        type=names,
        default=[],
        help="leave out this rule or family (repeatable; also A,B)",
    )
    add("--report", metavar="FORMAT[=PATH]", action="append", default=[], help=report)
    add(
        "-v",
        "--verbose",
        action="store_true",
        help="list what passed and what is not applicable, too",
    )
    add("--baseline", metavar="OLD.json", type=Path, help=baseline)
    policy = (
        "take configuration, baseline and suppressions from the base branch of a pull request,"
        " which can tighten them, not loosen: a git ref, a folder with a checkout, or a verify.yaml"
    )
    add("--policy", metavar="BASE", help=policy)


def names(text: str) -> list[str]:
    """The rules of one `--only` or `--skip`."""
    return [name for name in (part.strip() for part in text.split(",")) if name]


def wanted_reports(
    given: Sequence[str], json: bool, known: Collection[str], targets: Sequence[Path] = ()
) -> list[Report]:
    """`parsed_reports` whose paths can be written, or UserError, before anything has been run.

    `targets` are the files that the command is about.
    """
    found = parsed_reports(given, json, known)
    _check_paths(found, targets)
    return found


def parsed_reports(given: Sequence[str], json: bool, known: Collection[str]) -> list[Report]:
    """(format, path or None for stdout) of each report; text on stdout if none is asked for.

    Raises UserError.
    """
    found: list[Report] = []
    for text in [*given, *(["json"] if json else [])] or ["text"]:
        name, equals, given_path = text.partition("=")
        if name not in known:
            raise UserError(
                f"--report {text}: unknown format '{name}'; known: {', '.join(sorted(known))}"
            )
        if equals and not given_path:
            raise UserError(f"--report {text}: a path is missing after '='")
        found.append((name, Path(given_path) if given_path else None))
    if sum(path is None for _, path in found) > 1:
        raise UserError(
            "two reports cannot both go to stdout; give one of them a path: --report FORMAT=PATH"
        )
    return found


def reports_by_target(
    reports: Sequence[Report], names: Sequence[str], targets: Sequence[Path] = ()
) -> list[list[Report]]:
    """The reports of each target: its name replaces `{target}` in paths; `targets`: their scripts.

    Raises UserError where two would share a path or stdout, or where one cannot be written.
    """
    for name, path in reports if len(names) > 1 else ():
        if path is None and name not in LINES:
            raise UserError(
                f"several {name} reports cannot share stdout; write --report {name}=PATH with"
                f" {PLACE} in PATH, or choose one target with --target NAME"
            )
        if path is not None and PLACE not in str(path):
            raise UserError(f"--report {name}={path}: several targets need {PLACE} in the path")
    found = [
        [(name, None if path is None else for_target(path, target)) for name, path in reports]
        for target in names
    ]
    _check_paths([report for own in found for report in own], targets)
    return found


def for_target(path: Path, name: str) -> Path:
    """The path with the name of the target instead of `{target}`."""
    return Path(str(path).replace(PLACE, name))


def _check_paths(reports: Sequence[Report], targets: Sequence[Path]) -> None:
    """Raises UserError if a file cannot be written or replaced, or two reports share a path."""
    seen: set[Path] = set()
    named = [(name, path) for name, path in reports if path is not None]
    for name, path in named:
        if _resolved(path) in seen:
            raise UserError(
                f"--report {name}={path}: another report goes to the same path; give each its own"
            )
        seen.add(_resolved(path))
    for name, path in named:
        check_path(f"--report {name}={path}", path, targets)


def check_path(option: str, path: Path, targets: Sequence[Path] = ()) -> None:
    """Raises UserError if the file that this option names cannot be written, or not be replaced."""
    try:
        if problem := _problem(path, targets):
            raise UserError(f"{option}: {problem}")
    except (OSError, ValueError) as error:
        raise _unwritable(option, error) from None


def _problem(path: Path, targets: Sequence[Path]) -> str:
    """Why a report cannot be written there, else empty; its folder is made.

    Raises OSError or ValueError.
    """
    if (number := inputs.own_descriptor(path)) is not None:
        os.fstat(number)
        return ""
    if _resolved(path).is_symlink():
        return "is a link that leads to itself; give the path of a file"
    if path.is_dir():
        return "is a folder; give a path of a file in it"
    if path.exists() and not os.access(path, os.W_OK):
        return "cannot be written: Permission denied"
    if path.is_file():
        if any(target.is_file() and path.samefile(target) for target in targets):
            return "is the file that this command is about; give another path"
        if not may_be_replaced(path):
            return "exists, and is not a report of fsdp2; give another path, or remove it first"
    elif path.exists() and (kind := inputs.kind_of(path.stat())) and not path.is_char_device():
        return f"is {kind}; give the path of a file"
    if not path.exists() or path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = _temporary_sibling(path)
        beside.touch(exist_ok=False)
        beside.unlink()
    return ""


def write_reports(
    reports: Sequence[Report], result: T, renderers: Mapping[str, Callable[[T], str]]
) -> None:
    """Render and write each report, whole or not at all; the others are written where one cannot
    be.
    """
    failed: UserError | None = None
    for name, path in reports:
        text = renderers[name](result)
        if path is None:
            say(text.rstrip("\n"))
            continue
        try:
            write(path, text)
            log(f"report: {path}")
        except OSError as error:
            failed = failed or _unwritable(f"--report {name}={path}", error)
    if failed is not None:
        raise failed


def write(path: Path, text: str) -> None:
    """Write a file through a temporary sibling, so that no reader sees half of it; a device or pipe
    is written directly.
    """
    data = text.encode("utf-8", "backslashreplace")
    if _is_stream(path):
        _write_directly(path, data)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = _temporary_sibling(path)
    try:
        beside.write_bytes(data)
        beside.replace(_resolved(path))
    finally:
        beside.unlink(missing_ok=True)


def write_verdict(
    reports: Sequence[Report], verdict: Verdict, renderers: Mapping[str, Callable[[Verdict], str]]
) -> None:
    """`write_reports`; with the format github also the step's summary, where GitHub Actions has
    one. Where every report goes to a file, stdout has the first lines.
    """
    if any(name == "github" for name, _ in reports) and (
        path := os.environ.get("GITHUB_STEP_SUMMARY")
    ):
        _add_summary(Path(path), verdict)
    if all(path is not None and not _is_stream(path) for _, path in reports):
        from ..verifier.report.brief import brief

        say(brief(verdict))
    write_reports(reports, verdict, renderers)


def _add_summary(path: Path, verdict: Verdict) -> None:
    from ..verifier.report.github import SUMMARY, summary

    try:
        used = path.stat().st_size if path.is_file() else 0
        data = summary(verdict, SUMMARY - used).encode("utf-8", "backslashreplace")
        if _is_stream(path):
            _write_directly(path, data)
        else:
            with path.open("ab") as file:
                file.write(data)
    except OSError as error:
        log(f"the step summary {path} cannot be written: {error.strerror or error}")


def _is_stream(path: Path) -> bool:
    return inputs.own_descriptor(path) is not None or (path.exists() and not path.is_file())


def _write_directly(path: Path, data: bytes) -> None:
    """Write to a device, or to what the caller has connected to one of our own descriptors."""
    number = inputs.own_descriptor(path)
    if number is None:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    else:
        descriptor = os.dup(number)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        while data:
            if not poll.poll(PATIENCE * 1000):
                reason = f"nothing was read from it for {PATIENCE:.0f} s"
                raise OSError(errno.ETIMEDOUT, reason, str(path))
            data = data[os.write(descriptor, data[: select.PIPE_BUF]) :]  # as much as never waits
    finally:
        os.close(descriptor)


def _temporary_sibling(path: Path) -> Path:
    real = _resolved(path)
    return real.with_name(f".{real.name[:200]}.{os.getpid()}.part")


def _resolved(path: Path) -> Path:
    """Where the path leads. `Path.resolve` raises on a link that leads to itself."""
    return Path(os.path.realpath(path))


def _unwritable(option: str, error: Exception) -> UserError:
    reason = getattr(error, "strerror", None) or error
    return UserError(f"{option}: cannot be written: {reason}")
