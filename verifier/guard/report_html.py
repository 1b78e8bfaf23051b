"""Guarded runs as one self-contained HTML file: verdict, breaches, curves over each other."""

import math
import pkgutil
from typing import Any

from ..analysis.wording import count
from ..report import html_plots as plots
from ..report.html import SIZES, environment
from ..report.html_tables import Table
from ..report.sanitize import in_xml
from .report import Line, Run, not_held, of

ROWS, TEXT = SIZES[1]
MOST = 50  # breaches, and gaps of a run, that are shown
POINTS = 400  # of the curve of a run
# Field of a check, what it is, and how many times what 90 % are below is drawn at most.
CURVES = (("loss", "loss", 10.0), ("norm", "gradient norm", 10.0), ("step_seconds", "seconds", 3.0))


def page(runs: list[Run]) -> str:
    """The page."""
    source = (pkgutil.get_data(__name__, "guard.html.j2") or b"").decode()
    broken, held = sum(bool(run.breaches) for run in runs), any(run.of("check") for run in runs)
    rows = [[run.name, run.result(), run.held()] for run in runs]
    figures = [_figure(runs[: plots.LINES], *curve) for curve in CURVES]
    template = environment(TEXT).from_string(source)
    made = template.render(
        word=f"{broken} of {len(runs)} runs broke a law" if runs[1:] else runs[0].result(),
        tone="fail" if broken else "pass" if held else "inconclusive",
        several=len(runs) > 1,
        tables={"about": Table("Runs", "Run|Found|Held", rows)},
        rows=ROWS,
        found=[(run.name, one) for run in runs for one in run.breaches],
        gaps=[(run.name, [*not_held(run)][:MOST]) for run in runs],
        most=MOST,
        figures=[figure for figure in figures if figure is not None],
        undrawn=len(runs[plots.LINES :]),
    )
    return in_xml(made)


def _figure(runs: list[Run], field: str, title: str, most: float) -> dict[str, Any] | None:
    """The curves of runs over each other, a line for each start; None without numbers."""
    from markupsafe import Markup

    sizes = sorted(abs(value) for run in runs for _, value in _points(run.of("check"), field))
    if not sizes:
        return None
    limit, lines = most * sizes[len(sizes) * 9 // 10] or math.inf, []
    for k, start in ((k, start) for k, run in enumerate(runs) for start in run.starts):
        points = _points(of(start, "check"), field, 2 + POINTS // len(runs[k].starts))
        values = [max(-limit, min(limit, value)) for _, value in points]
        lines += [(_colour(k), [step for step, _ in points], values)] if points else []
    odd = [one["step"] for run in runs for one in run.of("check") if one[field] == math.inf]
    beyond = sum(size > limit for size in sizes)
    note = f" {count(beyond, 'value')} beyond {limit:.3g}, drawn there." if beyond else ""
    note += f" Not finite at {count(len(odd), 'check')}, from step {min(odd):,}." if odd else ""
    svg = [*plots.head(field, title, f"{title} at each check"), *_drawn(runs, lines), "</svg>"]
    legend = [(run.name, _colour(k)) for k, run in enumerate(runs)]
    return {"svg": Markup("\n".join(svg)), "title": title, "note": note, "legend": legend}


def _points(checks: list[Line], field: str, most: int = 1 << 40) -> list[tuple[int, float]]:
    """Steps and values; of many neighbours the least and the largest."""
    points = [(one["step"], one[field]) for one in checks if math.isfinite(one[field])]
    size = math.ceil(2 * len(points) / most) if len(points) > most else 1
    parts = (points[k : k + size] for k in range(0, len(points), size))
    ends = ([f(part, key=lambda one: one[1]) for f in (min, max)] for part in parts)
    return [one for pair in ends for one in sorted({*pair})]


def _drawn(runs: list[Run], lines: list[plots.Line]) -> list[str]:
    """Grid, axes, marks and curves."""
    ticks = plots.linear(lines)
    unit = max(abs(ticks[0][0]), abs(ticks[-1][0]))
    y = plots.Axis(ticks[0][0] / unit, ticks[-1][0] / unit, plots.BOTTOM, plots.TOP, unit)
    first, last = min(run.span[0] for run in runs), max(run.span[1] for run in runs)
    x = plots.Axis(first, last + 0.05 * (last - first or 1), plots.LEFT, plots.RIGHT)
    stride = math.ceil(max(1.0, plots.round_step((x.high - x.low) / 5)))
    steps = range(-(-first // stride) * stride, last + 1, stride)
    svg = [*plots.grid(y, ticks), *plots.axes(x, [(one, f"{one:,}") for one in steps], "step")]
    for k, run in enumerate(runs):
        later, found = [one[0]["step"] for one in run.starts[1:]], [b.step for b in run.breaches]
        for kind, colour, at, path in (
            ("save", "currentColor", [one["step"] for one in run.of("save")], "v-9"),
            ("start", "currentColor", later, f"V{plots.TOP}"),
            ("breach", "var(--fail)", found, f"V{plots.TOP}m-4 -4l8 8m0 -8l-8 8"),
        ):
            places = dict.fromkeys(round(x(step)) for step in at)
            d = "".join(f"M{place} {plots.BOTTOM}{path}" for place in places)
            stroke = _colour(k) if runs[1:] else colour
            svg.append(f'<path class="{kind}" stroke="{stroke}" d="{d}"/>')
    for colour, across, values in lines:
        begin, *corners = [f"{x(a)} {y(b)}" for a, b in zip(across, values, strict=True)]
        d = "L".join([f"M{begin}h0", *corners])
        svg.append(f'<path stroke="{colour}" stroke-width="2" d="{d}"/>')
    return svg


def _colour(k: int) -> str:
    return f"var(--line-{k % plots.COLOURS})"
