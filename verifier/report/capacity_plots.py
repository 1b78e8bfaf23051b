"""The plots of a plan as inline SVG: memory over time by kind, and memory against time of the
settings that were compared.

Text and grid have the colour of the page's text, areas the colours of its lines: both follow its
light and dark mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..analysis.settings_search import NO, Candidate, Explored, frontier, ordered, recommended
from ..trace.events import CapacityRecord, Moment
from .capacity import GIB, size
from .html_plots import AXES, BOTTOM, COLOURS, LEFT, RIGHT, TOP, Axis, axes, grid, head, round_step

Figure = dict[str, Any]
OTHERS = "others"
MUCH = 3.0  # times the peak: a limit above it is not in the drawing
# drawn at the bottom
LASTING = (
    "sharded parameters",
    "parameters that are not sharded",
    "optimizer state",
    "gradients",
    "buffers",
)
NARROW = 60  # of a phase in the drawing, below which its name does not fit


def memory(record: CapacityRecord, limit: int | None) -> Figure:
    """The course of memory as areas over each other; the line is the memory of the device."""
    peak = max((moment.bytes for moment in record.course), default=0)
    shown = limit if limit is not None and limit <= MUCH * peak else None
    top = max(peak, shown or 0) * 1.06
    x, y = Axis(0, len(record.course), LEFT, RIGHT), Axis(0, top, BOTTOM, TOP)
    names = _kinds(record.course)
    parts = [
        *head("memory", "Memory over time", "Bytes of tensors on the device, by kind"),
        *_grid(y, top),
    ]
    below = [0.0] * len(record.course)
    for number, name in enumerate(names):
        above = [
            start + _of(moment, name, names)
            for start, moment in zip(below, record.course, strict=True)
        ]
        parts.append(
            f'<path class="area" style="fill:{_colour(number)}" d="{_area(x, y, below, above)}"/>'
        )
        below = above
    parts += _phases(record.course, x)
    parts += [AXES]
    if shown is not None:
        parts += _limit(y, shown)
    far = (
        f" The device has {size(limit)}, above the drawing."
        if limit is not None and shown is None
        else ""
    )
    return {
        "title": "Memory over time",
        "description": (
            f"Tensors on the device by kind, at most {size(peak)}; from left to right each"
            f" allocation and release.{far}"
        ),
        "svg": "\n".join([*parts, "</svg>"]),
        "legend": [(name, _colour(number), 10) for number, name in enumerate(names)][::-1],
        "note": "",
    }


def settings(found: Explored) -> Figure:
    """Each choice of settings as a point with its number in the table."""
    rows = ordered(found.candidates)
    most = max(one.memory for one in rows)
    shown = found.memory if found.memory is not None and found.memory <= MUCH * most else None
    top = max(most, shown or 0) * 1.08
    values = [_across(one) for one in rows]
    unit, scale = _unit(max(values)) if found.gpu else ("GiB", GIB)
    low, high = min(values) / scale, max(values) / scale
    room = (high - low) * 0.06 or high * 0.1 or 1.0
    x, y = Axis(max(low - room, 0), high + room, LEFT, RIGHT), Axis(0, top, BOTTOM, TOP)
    title = f"least time of a step, {unit}" if found.gpu else "sent in a step, GiB"
    about = (
        f"Memory of a rank, with expandable segments, against {title}; the numbers are the rows of"
        " the table"
    )
    step = round_step((x.high - x.low) / 6)
    marks = [number * step for number in range(int(x.low / step) + 1, int(x.high / step) + 1)]
    parts = [*head("settings", "Settings", about), *_grid(y, top)]
    parts += axes(x, [(mark, f"{mark:.4g}") for mark in marks], title)
    parts += _limit(y, shown) if shown is not None else []

    def at(one: Candidate) -> tuple[float, float]:
        return x(_across(one) / scale), y(one.memory)

    front = [at(one) for one in frontier(found.candidates)]
    if found.gpu and len(front) > 1:
        parts.append(f'<polyline class="front" points="{" ".join(f"{a},{b}" for a, b in front)}"/>')
    parts += _points(rows, found, [at(one) for one in rows])
    legend = [("recommended", _colour(2), 10)] if found.memory is not None else []
    legend += [("fits" if found.memory is not None else "tried", _colour(0), 10)]
    legend += [("does not fit", _colour(1), 10)] if found.memory is not None else []
    return {
        "title": "Memory and time" if found.gpu else "Memory and traffic",
        "description": f"{about}." + (" Times are bounds, no forecast." if found.gpu else ""),
        "svg": "\n".join([*parts, "</svg>"]),
        "legend": legend,
        "note": "",
    }


def _points(
    rows: Sequence[Candidate], found: Explored, places: Sequence[tuple[float, float]]
) -> list[str]:
    """A dot for each, the recommended one on top and larger; a number where there is room for
    it.
    """
    best = recommended(found.candidates)
    taken: list[tuple[float, float]] = []
    dots, numbers = [], []
    for number, (one, at) in enumerate(zip(rows, places, strict=True), 1):
        colour = _colour(2 if one is best else 1 if one.fits() == NO else 0)
        dots.append(
            (
                one is best,
                (
                    f'<circle cx="{at[0]}" cy="{at[1]}" r="{7 if one is best else 4}"'
                    f' style="fill:{colour}"/>'
                ),
            )
        )
        if one is best or not any(
            abs(at[0] - other[0]) < 26 and abs(at[1] - other[1]) < 14 for other in taken
        ):
            taken.append(at)
            numbers.append(f'<text class="over" x="{at[0] + 9}" y="{at[1] + 4}">{number}</text>')
    return [dot for _, dot in sorted(dots, key=lambda dot: dot[0])] + numbers


def _across(one: Candidate) -> float:
    return one.bound.step if one.bound is not None else one.sent


def _unit(most: float) -> tuple[str, float]:
    return next(
        ((unit, scale) for unit, scale in (("s", 1.0), ("ms", 1e-3)) if most >= scale),
        ("\u00b5s", 1e-6),
    )


def _limit(y: Axis, memory: int) -> list[str]:
    line = f'<path class="limit" d="M{LEFT} {y(memory)}H{RIGHT}"/>'
    return [
        line,
        (
            f'<text class="over" x="{RIGHT - 4}" y="{y(memory) - 5}" text-anchor="end">the device:'
            f" {size(memory)}</text>"
        ),
    ]


def _kinds(course: Sequence[Moment]) -> list[str]:
    """From the bottom: what lasts, then the rest by size; those for which there is no colour
    together.
    """
    most: dict[str, int] = {}
    for moment in course:
        for kind, amount in moment.kinds.items():
            most[kind] = max(most.get(kind, 0), amount)
    largest = sorted(most, key=lambda kind: (kind not in LASTING[:4], -most[kind]))
    kept = largest if len(largest) <= COLOURS else [*largest[: COLOURS - 1], OTHERS]
    return sorted(kept, key=lambda kind: (kind not in LASTING, kind == OTHERS, -most.get(kind, 0)))


def _of(moment: Moment, name: str, names: Sequence[str]) -> int:
    if name == OTHERS:
        return sum(amount for kind, amount in moment.kinds.items() if kind not in names)
    return moment.kinds.get(name, 0)


def _area(x: Axis, y: Axis, below: Sequence[float], above: Sequence[float]) -> str:
    """Each moment is as wide as any other: its most memory, from its left to its right.

    Equal neighbours are one line.
    """

    def edge(values: Sequence[float]) -> list[tuple[float, float]]:
        steps: list[tuple[float, float]] = []
        for number, value in enumerate(values):
            if steps and steps[-1][1] == y(value):
                steps[-1] = x(number + 1), y(value)
            else:
                steps += [(x(number), y(value)), (x(number + 1), y(value))]
        return steps

    points = [*edge(above), *reversed(edge(below))]
    return "M" + "L".join(f"{a:g} {b:g}" for a, b in points) + "Z"


def _phases(course: Sequence[Moment], x: Axis) -> list[str]:
    """A line where a phase begins, and its name below."""
    starts = [n for n, moment in enumerate(course) if n == 0 or moment.phase != course[n - 1].phase]
    parts = []
    for start, end in zip(starts, [*starts[1:], len(course)], strict=True):
        parts += [f'<path class="grid" d="M{x(start)} {TOP}V{BOTTOM + 6}"/>'] if start else []
        if x(end) - x(start) >= NARROW:
            middle = (x(start) + x(end)) / 2
            parts.append(
                f'<text x="{middle:g}" y="{BOTTOM + 20}"'
                f' text-anchor="middle">{course[start].phase}</text>'
            )
    return parts


def _grid(y: Axis, top: float) -> list[str]:
    """Lines at round numbers of a binary unit, which is written at the top."""
    unit, shift = next(
        ((u, s) for u, s in (("GiB", 30), ("MiB", 20), ("KiB", 10)) if top >= 2 << s), ("B", 0)
    )
    step = round_step(top / (1 << shift) / 5)
    marks = [mark * step for mark in range(int(top / (1 << shift) / step) + 1)]
    lines = grid(y, [(mark * (1 << shift), f"{mark:g}") for mark in marks])
    return [*lines, f'<text x="{LEFT + 5}" y="{TOP + 12}">{unit}</text>']


def _colour(number: int) -> str:
    return f"var(--line-{number % COLOURS})"
