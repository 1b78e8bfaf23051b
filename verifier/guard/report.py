"""What the journals of a guarded run say: the ranks' files merged, and as text for a terminal.

Imports no torch. What a journal says is data, of processes that may have been killed, in several
starts of the run: lines may be cut, hold credentials, or be of another version.
"""

import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from glob import escape
from pathlib import Path
from typing import Any

from ..analysis.wording import count, cut, some
from ..errors import UserError
from ..report.redacted import given_secrets, redacted
from ..report.sanitize import sanitize
from .journal import SCHEMA, Breach

LINES, GAPS = 60, 9  # lines of a text; of them about what was not held
_LONGEST, _LONG = 1000, 400  # characters of a text that are kept, that a line shows
Line = dict[str, Any]
_BREACH = ("law", "step", "message", "ranks", "names", "since", "place", "edit", "command", "time")
_START = ("world", "step", "time", "host", "torch", "argv", "settings", "schema")
_FIELDS: Line = {  # of all kinds of lines, with what stands for one that is missing
    **dict.fromkeys((*_BREACH, *_START, "kind", "text", "line", "call"), ""),
    **dict.fromkeys(("step", "rank", "world", "schema", "more_names"), 0),
    **dict.fromkeys(("loss", "norm", "step_seconds"), math.inf),  # for NaN; NaN for none
    **{name: [None] for name in ("ranks", "late")},  # of whole numbers
    **{name: [""] for name in ("names", "argv")},
    "time": 0.0,
    "since": None,
}


@dataclass
class Found(Breach):
    """A breach of the journal; `again`: other steps with the same."""

    more_names: int = 0
    time: float = 0.0
    again: list[int] = field(default_factory=list)

    def where(self) -> str:
        """Steps and ranks."""
        since = self.step if self.since is None else self.since
        held = f" (held at step {since:,})" if since < self.step else ""
        held += f", again at {some(map(str, self.again))}" if self.again else ""
        ranks = f", rank{'s' * (len(self.ranks) > 1)} {some(map(str, self.ranks), 8)}"
        return f"step {self.step:,}{held}" + ranks * bool(self.ranks)

    def parameters(self, most: int) -> str:
        """Those that it names."""
        left = len(self.names[most:]) + self.more_names
        return cut(", ".join(self.names[:most]), _LONG) + (f" and {left} more" if left else "")


@dataclass
class Run:
    """The journals of one run."""

    name: str
    starts: list[list[Line]] = field(default_factory=list)  # the lines of each, `start` first
    others: list[Line] = field(default_factory=list)  # without a start
    breaches: list[Found] = field(default_factory=list)
    unread: int = 0  # lines

    def of(self, kind: str) -> list[Line]:
        """The lines of a kind."""
        return of([*self.others, *(line for start in self.starts for line in start)], kind)

    @property
    def span(self) -> tuple[int, int]:
        """The steps before the first start, and the last step."""
        first = min((start[0]["step"] for start in self.starts), default=0)
        return first, max((_last(start) for start in self.starts), default=0)

    def result(self) -> str:
        """Whether a law was broken."""
        if self.breaches:
            laws = some(dict.fromkeys(cut(one.law, 60) for one in self.breaches))
            return f"{len(self.breaches)} breach{'es' * (len(self.breaches) > 1)} ({laws})"
        if not self.of("check"):
            return "nothing was compared"
        return "no law was broken" + " in what was held" * any(map(bool, not_held(self)))

    def held(self) -> str:
        """How much was held."""
        first, last = self.span
        steps = f"{last - first:,} step{'s' * (last - first != 1)}"
        steps += f" ({first + 1:,} to {last:,})" if 0 < first < last else ""
        worlds = [str(start[0]["world"]) for start in self.starts]
        each = some(worlds if len({*worlds}) > 1 else worlds[:1], 8)
        starts = count(len(worlds), "start") + f" ({each} rank{'s' * (each != '1')})" * bool(worlds)
        return f"{steps} in {starts}, {count(len(self.of('check')), 'check')}"

    def as_json(self) -> dict[str, Any]:
        """For `--json`; the curves are in the journal."""
        found: Line = {"path": self.name, "verdict": f"{self.held()}: {self.result()}"}
        found |= {"breaches": [asdict(one) for one in self.breaches], "not_held": [*not_held(self)]}
        return {**found, "starts": [{n: start[0][n] for n in _START} for start in self.starts]}


def read_run(path: Path) -> Run:
    """The journal of rank 0, and those of other ranks beside it. Raises UserError."""
    run = Run(redacted(str(path)))
    lines = _lines(path, run)
    if not lines:
        raise UserError(f"{path}: no journal of the guard; `fsdp2 guard --out FILE` writes one")
    pattern = re.compile(re.escape(path.stem) + r"\.rank\d+" + re.escape(path.suffix))
    beside = sorted(path.parent.glob(f"{escape(path.stem)}.rank*"))
    lines += [line for one in beside if pattern.fullmatch(one.name) for line in _lines(one, run)]
    words = dict.fromkeys(word for line in lines for word in _as([""], line.get("argv")))
    for raw in redacted(lines, given_secrets({"command": shlex.join(words)})):
        line = {name: _as(kind, raw.get(name)) for name, kind in _FIELDS.items()}
        run.starts += [[]] if line["kind"] == "start" and not line["rank"] else []
        # What another rank says belongs to the last start before it.
        known = [s for s in run.starts if not (s and line["rank"]) or s[0]["time"] <= line["time"]]
        [run.others, *run.starts[:1], *known[-1:]][-1].append(line)
    # In order; of one step what may have begun earlier is first. What is said again is one breach.
    found = [Found(**{n: one[n] for n in (*_BREACH, "more_names")}) for one in run.of("breach")]
    kept: dict[tuple[str, ...], Found] = {}
    for one in sorted(found, key=lambda b: (b.step, b.since is None, b.since or 0, b.time)):
        first = kept.setdefault((one.law, one.message, one.place), one)
        first.ranks = sorted({*first.ranks, *one.ranks})
        first.again = sorted({*first.again, one.step} - {first.step})
    run.breaches = [*kept.values()]
    return run


def _lines(path: Path, run: Run) -> list[Line]:
    """The lines that can be read; the others are counted."""
    lines = []
    try:
        for text in filter(str.strip, path.read_text("utf-8", "replace").splitlines()):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                line = None
            known = isinstance(line, dict) and "kind" in line and "time" in line
            lines += [{name: line[name] for name in _FIELDS if name in line}] if known else []
            run.unread += not known
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error
    return lines


def _as(kind: Any, value: Any) -> Any:
    """A value as its field has it; one of another type as if there were none."""
    if isinstance(kind, list):
        found = [_as(kind[0], one) for one in value] if isinstance(value, list) else []
        return [one for one in found if one not in (None, "")]
    if isinstance(kind, str):
        return cut(" ".join(value.split()), _LONGEST) if isinstance(value, str) else ""
    whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53
    if not isinstance(kind, float):
        return value if whole else kind
    if whole or (isinstance(value, float) and math.isfinite(value)):
        return float(value)
    return math.nan if kind == math.inf and not isinstance(value, float) else kind


def of(lines: list[Line], kind: str) -> list[Line]:
    """Of lines those of a kind."""
    return [line for line in lines if line["kind"] == kind]


def _last(lines: list[Line]) -> int:
    return max(int(line["step"]) for line in lines)


def not_held(run: Run) -> Iterator[str]:
    """What no law was held on, a line each."""
    checks = run.of("check")
    starts = [(n, _last([s[0], *of(s, "check")]), s) for n, s in enumerate(run.starts, 1)]
    if not starts:
        yield "no start of rank 0 is there: no first step, or the journal of another rank"
    if killed := [f"{n} (compared up to {to:,})" for n, to, s in starts if not of(s, "end")]:
        running = "" if of(run.starts[-1], "end") else "; the last may still run"
        yield f"no end was written, the process was killed: start {some(killed)}{running}"
    if after := [f"{to + 1:,} to {_last(s):,} (start {n})" for n, to, s in starts if to < _last(s)]:
        yield f"no check followed steps {some(after)}"
    if late := Counter(rank for check in checks for rank in check["late"]):
        missed = sum(bool(check["late"]) for check in checks)
        each = some((f"rank {rank} ({times} x)" for rank, times in late.most_common()), 4)
        yield f"{missed} of {count(len(checks), 'check')} lack ranks that were late: {each}"
    if (stalls := run.of("stall")) and not any(one.law == "hang" for one in run.breaches):
        where = f"rank {stalls[0]['rank']} at {stalls[0]['line']} {stalls[0]['call']}"
        yield f"{len(stalls)} x a rank made no step for long, first {where}"
    if others := {start[0]["schema"] for start in run.starts} - {SCHEMA}:
        yield f"schema {some(map(str, others))} is not known here: what is known was read"
    if run.unread:
        yield f"{count(run.unread, 'line')} could not be read: cut, or not of the guard"
    for kind, before in (("error", "fault of the guard itself: "), ("note", "")):
        for text, times in Counter(one["text"] for one in run.of(kind)).items():
            yield f"{before}{text}" + f" ({times} x)" * (times > 1)


def text(run: Run) -> str:
    """For a terminal: at most LINES lines, the verdict first."""
    gaps, breaches = [cut(one, _LONG) for one in not_held(run)], run.breaches
    if len(gaps) > GAPS:
        gaps = [*gaps[: GAPS - 1], f"and {len(gaps) - GAPS + 1} more; --json has all"]
    lines = [f"{run.name}: {run.held()}: {run.result()}"]
    if (together := sum(one.step == breaches[0].step for one in breaches)) > 1:
        lines += [f"{together} are of step {breaches[0].step:,}: the first may cause the others"]
    shown = _fitting(breaches, LINES - len(lines) - len(gaps) - 2)
    laws = Counter(one.law for one in breaches)
    for law in dict.fromkeys(one.law for one in breaches if id(one) in shown):
        lines += [f"{cut(law, 60)}: {laws[law]}"]
        lines += [part for one in breaches if one.law == law for part in shown.get(id(one), ())]
    if len(shown) < len(breaches):
        lines += [f"{len(breaches) - len(shown):,} more are left out; --json has all"]
    lines += ["not held:", *(f"  {one}" for one in gaps)] if gaps else []
    return sanitize("\n".join(lines))


def _fitting(breaches: list[Found], room: int) -> dict[int, list[str]]:
    """The lines of breaches for which there is room, the first of each law before others."""
    firsts = {one.law: id(one) for one in reversed(breaches)}
    shown: dict[int, list[str]] = {}
    for one in sorted(breaches, key=lambda one: firsts[one.law] != id(one)):
        more = {"parameters": one.parameters(3), "edit": one.edit, "command": one.command}
        place = f"; at {one.place}" if one.place else ""
        lines = [f"  {one.where()}: {cut(one.message, _LONG)}{place}"]
        lines += [f"    {name}: {cut(value, _LONG)}" for name, value in more.items() if value]
        room -= len(lines) + (firsts[one.law] == id(one))
        if room < 0:
            break
        shown[id(one)] = lines
    return shown
