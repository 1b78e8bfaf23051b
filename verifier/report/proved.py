"""What a verdict proved and what it left out, in two lines: they begin the report in every format.

pass: steps 1-9 of 120, on 2 ranks, 1, 4; CPU; observed: all 120 steps
not covered: accumulation (train.py:88, --accum), if cfg.compile: (train.py:41), 3 more
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from ..analysis.parts_in_sources import NAMES
from ..analysis.wording import count
from ..config.option import SET
from ..config.parts import OPTIONS
from ..finding import Finding
from ..verdict import Verdict
from .locations import shortest

# Of what is not covered, in the second line: at least so many, and more up to this length, which is
# two lines of a terminal.
SHOWN, LENGTH = 3, 220
_ABOUT_SAVES = re.compile(r"sav(e|ing)|resum|ckpt|checkpoint|restore|load_", re.I)
ENOUGH = 12  # characters of code
UNSEEN = "later steps and branches (no survey run with --steps or --quick)"
EMPTY = "later steps and branches (the survey run made no step)"
Facts = Mapping[str, Any]


def headline(verdict: Verdict) -> list[str]:
    """The two lines, or the first alone; [] where ranks compared nothing."""
    facts = verdict.facts.get("coverage")
    if facts is None or verdict.tier != "ranks":
        return []
    first = f"{verdict.answer}: {_why(verdict)}{extent(facts)}"
    left = not_covered(verdict)
    shown = left[: _fitting(left)]
    more = [f"{len(left) - len(shown)} more"] if len(left) > len(shown) else []
    return [first, *([f"not covered: {', '.join([*shown, *more])}"] if left else [])]


def extent(facts: Facts) -> str:
    """`steps 1-9 of 120, on 2 ranks, 1, 4; CPU`, and how many steps rules saw that compare none."""
    parts = _ranges(_joined(facts["steps"]))
    steps = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
    made = facts["made"]
    whole = f" of {made}" if facts["whole"] else f" of {made} or more"
    of = whole if made else " of an unknown number (no run made all)"
    ranks = ", ".join([count(facts["ranks"][0], "rank"), *map(str, facts["ranks"][1:])])
    device = "GPU" if facts["parts"]["gpu"]["done"] else "CPU"
    compared = sum(last - first + 1 for first, last in _joined(facts["steps"]))
    seen = facts.get("observed", 0)
    every = "all " if facts["whole"] else ""
    observed = f"; observed: {every}{seen} steps" if seen > compared else ""
    return f"steps {steps}{of}, on {ranks}; {device}{observed}"


def _joined(steps: Iterable[Sequence[int]]) -> list[tuple[int, int]]:
    """Windows that follow one another, or overlap, as one."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(map(tuple, steps)):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return joined


def _ranges(steps: Iterable[Sequence[int]]) -> list[str]:
    return [f"{first}-{last}" if last > first else f"{first}" for first, last in steps]


def not_covered(verdict: Verdict) -> list[str]:
    """What no run did of what the script has, what matters most first."""
    return [text for text, _ in _left(verdict)]


def branches_named(verdict: Verdict) -> list[Facts]:
    """The branches that the second line names: no list below it need name them again."""
    if not headline(verdict):
        return []
    left = _left(verdict)
    fitting = _fitting([text for text, _ in left])
    return [branch for _, branch in left[:fitting] if branch is not None]


def _fitting(left: Sequence[str]) -> int:
    """How many of the texts the second line has."""
    lengths = accumulate(len(text) + 2 for text in left)
    return max(SHOWN, sum(length <= LENGTH for length in lengths))


def _left(verdict: Verdict) -> list[tuple[str, Facts | None]]:
    """(what no run did, the branch of the horizon that it is)."""
    facts, horizon = verdict.facts.get("coverage"), verdict.facts.get("horizon")
    branches = list(horizon["lines"]) if horizon is not None else []
    parts = list(_parts(facts, branches)) if facts is not None else []
    if facts is not None and not facts["parts"]["checkpoint"]["done"]:
        # `checkpoint` has said that nothing was saved and resumed: other branches are news
        branches.sort(key=lambda one: bool(_ABOUT_SAVES.search(one.get("side") or one["code"])))
    left = [*parts, *((_branch(one), one) for one in _one_of_each_line(branches))]
    if facts is None:
        return left
    others = [*_steps(facts), *_reasons(verdict.findings, facts)]
    # Without a survey run nothing shows what else the script has: that comes first.
    surveyed = any(run["role"] == "survey" for run in verdict.runs)
    blind = [] if facts["made"] else [(EMPTY if surveyed else UNSEEN, None)]
    # nor does a run show what a step would have been without an error that was caught in it
    caught = [(_caught(one), None) for one in facts.get("caught", ())]
    return [*blind, *caught, *left, *((text, None) for text in others)]


def _why(verdict: Verdict) -> str:
    """Which rules failed, or could not be judged: the first, and how many more."""
    if verdict.answer in ("fail", "error"):
        found = [f for f in verdict.findings if f.status == verdict.answer and not f.warns]
        return _first([f for f in found if not f.consequence] or found, "; ")
    if verdict.answer != "inconclusive":
        return ""
    unsure = [f for f in verdict.findings if f.status == "inconclusive" and f.required]
    return _first(unsure, " could not be judged; ")


def _first(found: Sequence[Finding], words: str) -> str:
    named = list(dict.fromkeys(f.rule for f in found))
    more = f" and {len(named) - 1} more" if len(named) > 1 else ""
    return f"{named[0]}{more}{words}" if named else ""


def _parts(facts: Facts, branches: list[Facts]) -> Iterator[tuple[str, Facts | None]]:
    """The parts that no run did. Of each the first branch that its option leaves out is taken from
    `branches`: its line is the part's.
    """
    parts = facts["parts"]
    left = [
        name for name, one in parts.items() if one["there"] and (one["tried"] or not one["done"])
    ]
    # a script that does not save cannot resume: only the first of these says something
    for name in [name for name in OPTIONS if name in left][:1]:
        one = parts[name]
        # the branch that saves is named by what it does
        branch = next((b for b in branches if _has(b, one)), None)
        if branch is not None:
            branches.remove(branch)
        yield _part(name, one), branch
    for name in (name for name in left if name not in OPTIONS):
        part = parts[name]
        branch = next(_of_part(branches, name, part), None)
        if branch is not None:
            branches.remove(branch)
            part = {**part, "file": branch["file"], "line": branch["first"]}
        yield _part(name, part), branch


def _of_part(branches: Sequence[Facts], name: str, part: Facts) -> Iterator[Facts]:
    """The branches that lead to a part's line and name it, then those whose condition has its
    option.
    """
    for branch in branches:
        words = set(re.split(r"[^a-z0-9]+", branch["code"].lower()))
        if _has(branch, part) and not words.isdisjoint(NAMES.get(name, ())):
            yield branch
    option = re.escape(part["option"].removeprefix(SET).lstrip("-").replace("-", "_"))
    yield from (b for b in branches if option and re.search(rf"\b{option}\b", b["code"]))


def _has(branch: Facts, part: Facts) -> bool:
    inside = branch["file"] == part["file"]
    return inside and bool(branch["first"] <= part["line"] <= branch["last"])


def _part(name: str, one: Facts) -> str:
    """`accumulation (train.py:88, --accum)`, `reshard (on 4 ranks: the run stopped)`."""
    where = f"{shortest(one['file'])}:{one['line']}" if one["file"] else ""
    known = ", ".join(filter(None, [where, one["option"]]))
    known = one["tried"] or known
    return f"{name} ({known})" if known else name


def _one_of_each_line(branches: Iterable[Facts]) -> Iterator[Facts]:
    """The branches without further sides of expressions in the same line."""
    seen: set[tuple[str, int]] = set()
    for one in branches:
        line = (one["file"], one["first"])
        if line not in seen or not one.get("side"):
            yield one
        seen.add(line)


def _branch(one: Facts) -> str:
    """A branch that no run reached, by its condition; the side of an expression; a later step."""
    late = f", after step {one['after_step']}" if one["after_step"] is not None else ""
    text = one.get("side") or one["code"]
    part, _, _ = text.partition("` of `")
    # a long side says enough without the expression that has it
    shown = f"{part}`" if one.get("side") and len(part) > ENOUGH and part != text else text
    return f"{shown} ({shortest(one['file'])}:{one['first']}{late})"


def _caught(one: Facts) -> str:
    """`an error caught in step 36 (train.py:88)`."""
    return f"an error caught in step {one['step']} ({shortest(one['file'])}:{one['line']})"


def _steps(facts: Facts) -> Iterator[str]:
    if facts["one_process"] is not None:
        yield f"one process after step {facts['one_process']}"
    behind = [*_joined(facts["steps"]), (facts["made"] + 1, 0)]
    gaps = [(a[1] + 1, b[0] - 1) for a, b in pairwise(behind) if b[0] > a[1] + 1]
    parts = _ranges(gaps)
    if parts:
        yield f"steps {' and '.join(parts)}"


def _reasons(findings: Sequence[Finding], facts: Facts) -> Iterator[str]:
    """What else no run did, for which rules judged nothing."""
    others = dict.fromkeys(f.part for f in findings if f.status == "not_covered")
    yield from (part for part in others if part not in facts["parts"])
