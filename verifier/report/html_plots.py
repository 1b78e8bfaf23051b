"""The plots of the HTML report as inline SVG: the curves of all runs, and their differences against
what is allowed.

Text and grid have the colour of the page's text, lines the colours `--line-0` to `--line-7`: both
follow its light and dark mode.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .html_tables import curves, label, offset

Report = dict[str, Any]
Line = tuple[str, list[int], list[float]]  # name, steps, values
Ticks = list[tuple[float, str]]  # position, label
LINES, POINTS = 16, 200  # lines of one figure; points of one line
MARKED = 30  # points of a line that has markers
LEAST = 1e-17  # a smaller difference is drawn as this one
LEFT, RIGHT, TOP, BOTTOM, WIDTH = 70, 630, 12, 260, 640  # the axes, and the width of the drawing
AXES = f'<path class="axis" d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}"/>'
COLOURS = 8


@dataclass(frozen=True)
class Axis:
    """From values to places of the drawing. `low` and `high` are in `unit`."""

    low: float
    high: float
    first: float
    last: float
    unit: float = 1.0

    def __call__(self, value: float) -> float:
        share = (value / self.unit - self.low) / (self.high - self.low)
        return round(self.first + share * (self.last - self.first), 1)


def figures(report: Report) -> list[Report]:
    """{"title", "description", "svg", "legend", "note"} of each plot that has something to show."""
    drawn: list[tuple[str, str, str, list[Line], Ticks, float | None]] = []
    for field, title in (("losses", "Loss"), ("grad_norms", "Gradient norm")):
        if lines := _drawable(
            (label(run), run[field], offset(report, run)) for run in curves(report)
        ):
            runs = "1 run" if len(lines) == 1 else f"{len(lines)} runs over each other"
            about = f"{runs}; the table below has the numbers."
            drawn.append(
                (f"{title} of each step", about, title.lower(), lines, linear(lines), None)
            )
    runs, found = report["runs"], report["facts"].get("comparisons", [])
    for field, title in (("loss", "loss"), ("grad_norm", "gradient norm")):
        limits = sorted({c["allowed"][field] for c in found if c["allowed"][field]})
        about = f"Relative difference of the {title} from its reference run, on a logarithmic scale"
        about += f"; at most {limits[0]:.2g} is allowed." if limits else "."
        names = [f"{label(runs[c['run']])}, against {runs[c['oracle']]['role']}" for c in found]
        if lines := _drawable(
            (name, c[field], c["after_step"]) for name, c in zip(names, found, strict=True)
        ):
            scaled, ticks, allowed = _logarithmic(lines, limits)
            drawn.append(
                (f"Difference of the {title}", about, "relative difference", scaled, ticks, allowed)
            )
    return [
        {
            "title": title,
            "description": about,
            "svg": _svg(f"plot{k}", title, about, axis, lines[:LINES], ticks, allowed),
            "legend": [(text, *_stroke(k)) for k, (text, *_) in enumerate(lines[:LINES])],
            "note": (
                f"{len(lines) - LINES} more are not drawn; the table has them."
                if len(lines) > LINES
                else ""
            ),
        }
        for k, (title, about, axis, lines, ticks, allowed) in enumerate(drawn, 1)
    ]


def _drawable(series: Iterable[tuple[str, list[float | None], int]]) -> list[Line]:
    """The series with a value, at most about POINTS points of each.

    `int`: the steps before the first value.
    """
    lines = []
    for name, values, after in series:
        points = [
            (after + step, value) for step, value in enumerate(values, 1) if value is not None
        ]
        stride = max(1, math.ceil(len(points) / POINTS))
        kept = [*points[:-1:stride], *points[-1:]]
        if kept:
            lines.append((name, [step for step, _ in kept], [value for _, value in kept]))
    return lines


def linear(lines: list[Line]) -> Ticks:
    """Ticks at round numbers that enclose all values."""
    values = [value for _, _, line in lines for value in line]
    largest = max(map(abs, values))
    # any float fits: no overflow below
    unit = 10.0 ** max(math.floor(math.log10(largest)), -323) if largest else 1.0
    low, high = min(values) / unit, max(values) / unit
    room = (high - low) * 0.02 or 0.5
    step = round_step((high - low + 2 * room) / 5)
    marks = range(math.floor((low - room) / step), math.ceil((high + room) / step) + 1)
    return [(mark * step * unit, f"{mark * step * unit:.6g}") for mark in marks]


def _logarithmic(lines: list[Line], limits: list[float]) -> tuple[list[Line], Ticks, float | None]:
    """The lines and ticks in powers of ten; a difference of 0 is drawn at the bottom."""
    positive = [value for _, _, values in lines for value in values if value > 0.0]
    low = math.floor(math.log10(max(min([*positive, *limits, 1e-7]), LEAST))) - 1
    high = math.ceil(math.log10(max([*positive, *limits, 1e-6])))
    stride = max(1, math.ceil((high - low) / 6))
    powers = range(low + stride, high + stride, stride)
    ticks = [(float(low), "0"), *((float(power), f"1e{power}") for power in powers)]

    def scaled(value: float) -> float:
        return max(math.log10(value), low) if value > 0 else low

    drawn = [(name, steps, list(map(scaled, values))) for name, steps, values in lines]
    return drawn, ticks, math.log10(limits[0]) if limits else None


def round_step(least: float) -> float:
    """The smallest of 1, 2, 2.5, 5 and 10 times a power of ten that is at least this."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10, 20) if factor * power >= least)


def _svg(
    name: str,
    title: str,
    about: str,
    axis: str,
    lines: list[Line],
    ticks: Ticks,
    allowed: float | None,
) -> str:
    """The drawing. `allowed`: where the limit is, on the scale of the ticks."""
    steps = [step for _, line, _ in lines for step in line]
    first, last = min(steps), max(steps)
    first, last = (first - 1, last + 1) if first == last else (first, last)
    low, high = ticks[0][0], ticks[-1][0]
    unit = max(abs(low), abs(high))  # high - low may overflow, the difference of ratios not
    x, y = Axis(first, last, LEFT, RIGHT), Axis(low / unit, high / unit, BOTTOM, TOP, unit)
    stride = math.ceil(max(1.0, round_step((last - first) / 8)))
    marks = [(step, str(step)) for step in range(-(-first // stride) * stride, last + 1, stride)]
    parts = [*head(name, title, about), *grid(y, ticks), *axes(x, marks, "optimizer step")]
    parts += [
        f'<text transform="translate(14 {(TOP + BOTTOM) // 2}) rotate(-90)"'
        f' text-anchor="middle">{axis}</text>'
    ]
    parts += _allowed(y(allowed)) if allowed is not None else []
    for k, (_, line, values) in enumerate(lines):
        parts += _curve(k, list(zip(map(x, line), map(y, values), strict=True)))
    return "\n".join([*parts, "</svg>"])


def head(name: str, title: str, about: str) -> list[str]:
    """The head of a drawing, with what a screen reader says of it."""
    return [
        f'<svg viewBox="0 0 {WIDTH} {BOTTOM + 50}" role="img" aria-labelledby="{name}-title'
        f' {name}-desc">',
        f'<title id="{name}-title">{title}</title><desc id="{name}-desc">{about}</desc>',
    ]


def grid(y: Axis, ticks: Ticks) -> list[str]:
    """A line across the drawing at each tick."""
    parts = []
    for value, text in ticks:
        parts += [f'<path class="grid" d="M{LEFT} {y(value)}H{RIGHT}"/>']
        parts += [f'<text x="{LEFT - 6}" y="{y(value) + 4}" text-anchor="end">{text}</text>']
    return parts


def axes(x: Axis, marks: Iterable[tuple[float, str]], title: str) -> list[str]:
    """Both axes; below them the marks and the title."""
    return [
        *(
            f'<text x="{x(value)}" y="{BOTTOM + 20}" text-anchor="middle">{text}</text>'
            for value, text in marks
        ),
        AXES,
        f'<text x="{(LEFT + RIGHT) // 2}" y="{BOTTOM + 42}" text-anchor="middle">{title}</text>',
    ]


def _allowed(limit: float) -> list[str]:
    """What is allowed, as an area below its limit."""
    return [
        f'<path class="allowed" d="M{LEFT} {limit}H{RIGHT}V{BOTTOM}H{LEFT}Z"/>',
        f'<path class="limit" d="M{LEFT} {limit}H{RIGHT}"/>',
        f'<text x="{RIGHT - 4}" y="{limit - 4}" text-anchor="end">allowed</text>',
    ]


def _curve(number: int, points: list[tuple[float, float]]) -> list[str]:
    """A line, and its points where they are few."""
    colour, size = _stroke(number)
    corners = " ".join(f"{px},{py}" for px, py in points)
    parts = [f'<polyline stroke="{colour}" stroke-width="{size:g}" points="{corners}"/>']
    if len(points) <= MARKED:
        dots = "".join(f"M{px} {py}h0" for px, py in points)
        parts += [f'<path stroke="{colour}" stroke-width="{size + 3:g}" d="{dots}"/>']
    return parts


def _stroke(number: int) -> tuple[str, float]:
    """The colour and the width of a line; the first is the widest, so that equal curves all
    show.
    """
    return f"var(--line-{number % COLOURS})", max(1.5, 6.0 - 1.2 * number)
