"""The plots of the page: curves of all runs over each other, and their differences against what was allowed.

matplotlib draws them; the colours become those of the page, so that they are right in dark mode too. Nothing of the script's own
text is in them.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .html_tables import curves, label, offset

Report = dict[str, Any]
Line = tuple[str, list[int], list[float]]
LINES, POINTS, MARKED = 16, 200, 30  # lines of one figure; points of one line; points that have marks
LEAST = 1e-17  # a smaller difference is drawn as this one
INK = "#010100"  # becomes the colour of the text
COLOURS = [f"#0102{k:02x}" for k in range(8)]
SETTINGS: dict[Any, Any] = {"svg.hashsalt": "fsdp2", "svg.fonttype": "none", "font.size": 10, "axes.spines.top": False}
SETTINGS |= {
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.18,
    "grid.color": INK,
    "legend.frameon": False,
}
SETTINGS |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)


def figures(report: Report) -> list[Report]:
    """{"id", "title", "description", "svg", "note"} of each plot that has something to show."""
    drawn = []
    for field, title in (("losses", "Loss"), ("grad_norms", "Gradient norm")):
        if lines := _curves(report, field):
            runs = "1 run" if len(lines) == 1 else f"{len(lines)} runs over each other"
            told = f"{title} by optimizer step, {runs}; the table below has the numbers."
            drawn.append(_figure(f"{title} of each step", told, lines, []))
    for field, title in (("loss", "loss"), ("grad_norm", "gradient norm")):
        found = report["facts"].get("comparisons", [])
        limits = sorted({c["allowed"][field] for c in found if c["allowed"][field]})
        told = f"Relative difference of the {title} from the run that is its measure, on a logarithmic scale"
        told += f"; at most {limits[0]:.2g} is allowed." if limits else "."
        if lines := _differences(report, field):
            drawn.append(_figure(f"Difference of the {title}", told, lines, limits))
    return [{**figure, "svg": _inline(figure, k)} for k, figure in enumerate(drawn, 1)]


def _curves(report: Report, field: str) -> list[Line]:
    return _drawable((label(run), run[field], offset(report, run)) for run in curves(report))


def _differences(report: Report, field: str) -> list[Line]:
    runs = report["runs"]
    return _drawable(
        (f"{label(runs[c['run']])}, against {runs[c['oracle']]['role']}", c[field], c["after_step"])
        for c in report["facts"].get("comparisons", [])
    )


def _drawable(series: Iterable[tuple[str, list[float | None], int]]) -> list[Line]:
    lines = [(name, *_points(values, after)) for name, values, after in series]
    return [line for line in lines if line[1]]


def _points(values: list[float | None], after: int) -> tuple[list[int], list[float]]:
    found = [(after + step, value) for step, value in enumerate(values, 1) if value is not None]
    stride = max(1, math.ceil(len(found) / POINTS))
    kept = [*found[:-1:stride], *found[-1:]]
    return [step for step, _ in kept], [value for _, value in kept]


def _figure(title: str, told: str, lines: list[Line], limits: list[float]) -> Report:
    difference = title.startswith("Difference")
    more = len(lines) - LINES
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # not the reader's own style
        matplotlib.rcParams.update(SETTINGS)
        figure = Figure(figsize=(6.4, 3.4), layout="constrained")
        axes = figure.add_subplot()
        if difference:
            lines = _logarithmic(axes, lines, limits)
        for k, (name, steps, values) in enumerate(lines[:LINES]):
            width = max(1.2, 6.0 - 1.2 * k)  # the first is the widest, so that equal curves all show
            axes.plot(
                steps,
                values,
                color=COLOURS[k % 8],
                lw=width,
                marker="o" if len(steps) <= MARKED else None,
                ms=width + 2,
                label=name,
                solid_capstyle="round",
            )
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("relative difference" if difference else title.removesuffix(" of each step").lower())
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        if all(len(steps) == 1 for _, steps, _ in lines):
            axes.set_xlim(lines[0][1][0] - 1, lines[0][1][0] + 1)
        figure.legend(loc="outside lower center", ncols=2, fontsize=9)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    note = f"{more} more are not drawn; the table has them." if more > 0 else ""
    return {"title": title, "description": told, "svg": out.getvalue(), "note": note}


def _logarithmic(axes: Any, lines: list[Line], limits: list[float]) -> list[Line]:
    """A scale for values of which some are 0: these stand on its foot."""
    positive = [value for _, _, values in lines for value in values if value > 0.0]
    low = 10.0 ** (math.floor(math.log10(max(min([*positive, *limits, 1e-7]), LEAST))) - 1)
    high = max([*positive, *limits, 1e-6])
    axes.set_yscale("log")
    axes.set_ylim(low / 2, high * 10)
    axes.set_yticks(*_ticks(low, high))
    axes.minorticks_off()
    if limits:
        axes.axhspan(low / 2, limits[0], color=INK, alpha=0.07, lw=0)
        axes.axhline(limits[0], color=INK, lw=1, ls="--")
        axes.text(
            0.995, limits[0], "allowed", transform=axes.get_yaxis_transform(), ha="right", va="bottom", fontsize=9
        )
    return [(name, steps, [max(value, low) for value in values]) for name, steps, values in lines]


def _ticks(low: float, high: float) -> tuple[list[float], list[str]]:
    first, last = round(math.log10(low)), math.ceil(math.log10(high))
    stride = max(1, math.ceil((last - first) / 6))
    powers = range(first + stride, last + 1, stride)
    return [low, *(10.0**p for p in powers)], ["0", *(f"1e{p}" for p in powers)]


def _inline(figure: Report, number: int) -> str:
    """The drawing for use inside the page: without prolog, metadata and names of its own that another may have."""
    svg = figure["svg"][figure["svg"].index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    opening, rest = svg.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', opening)
    prefix = f"plot{number}"
    rest = re.sub(r'\bid="', f'id="{prefix}-', rest)
    rest = re.sub(r'xlink:href="#', f'href="#{prefix}-', rest)
    rest = rest.replace("url(#", f"url(#{prefix}-")
    for k, colour in enumerate(COLOURS):
        rest = rest.replace(colour, f"var(--line-{k})")
    rest = rest.replace(INK, "currentColor")
    names = (
        f'<title id="{prefix}-title">{figure["title"]}</title><desc id="{prefix}-desc">{figure["description"]}</desc>'
    )
    told = f'role="img" aria-labelledby="{prefix}-title {prefix}-desc"'
    return f"<svg {box[0] if box else ''} {told}>{names}{rest}"
