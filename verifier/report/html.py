"""One self-contained page for people: the verdict first, then what is wrong, what is open, and what was seen.

Whatever comes from the script is data: every string is cut, made visible and escaped on its way into the template.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sized
from pathlib import Path
from typing import Any

from ..verdict import Verdict
from . import html_tables
from .json_report import as_dict
from .sanitize import in_xml
from .sanitize import shown as visible

LIMIT = 1_000_000  # bytes
SIZES = ((2_500, 4_000), (2_500, 1_000), (1_000, 1_000), (250, 500), (40, 60))  # rows of a table, characters of a text
Report = dict[str, Any]
_SYMBOLS = {"pass": "\u2713", "fail": "\u2717", "inconclusive": "?", "error": "!", "no_findings": "\u2013"}


def render(verdict: Verdict) -> str:
    """The page, at most about a megabyte: what is too long is cut, and says so."""
    report = as_dict(verdict)
    figures = _figures(report)
    for rows, text in SIZES:
        page = in_xml(_page(report, verdict.partial, figures, rows, text))
        if len(page.encode("utf-8")) <= LIMIT:
            break
    return page


def _figures(report: Report) -> list[dict[str, Any]] | None:
    """The plots, if there is something to draw; None without matplotlib."""
    if not html_tables.curves(report):
        return []
    try:
        with _no_font_cache():
            from . import html_plots
    except ImportError:
        return None
    return html_plots.figures(report)


@contextlib.contextmanager
def _no_font_cache() -> Iterator[None]:
    """matplotlib keeps a list of fonts in the user's home when it is first imported; nothing is written there for a report."""
    if "MPLCONFIGDIR" in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="fsdp2-fonts-") as folder:
        os.environ["MPLCONFIGDIR"] = folder
        try:
            yield
        finally:
            del os.environ["MPLCONFIGDIR"]


def _page(report: Report, partial: str, figures: list[dict[str, Any]] | None, rows: int, text: int) -> str:
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_visible(text, Markup),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    drawn = [{**figure, "svg": Markup(figure["svg"])} for figure in figures or ()]
    return environment.get_template("report.html.j2").render(
        report=report,
        symbol=_SYMBOLS[report["verdict"]],
        sentence=partial or sentence(report),
        failed=[f for f in report["findings"] if f["status"] in ("fail", "error") and not f["consequence"]],
        followers=[f for f in report["findings"] if f["status"] in ("fail", "error") and f["consequence"]],
        reasons=_reasons(report),
        tables=html_tables.tables(report),
        figures=drawn,
        plots_missing=figures is None,
        rows=rows,
        articles=rows // 10,
        place=html_tables.place,
        brief=_brief,
        count=_count,
    )


def sentence(report: Report) -> str:
    """The verdict in one sentence."""
    findings = report["findings"]
    broken = [f["rule"] for f in findings if f["status"] == "fail" and not f["consequence"]]
    unsure = [f["rule"] for f in findings if f["status"] in ("inconclusive", "error")]
    held = [f["rule"] for f in findings if f["status"] == "pass"]
    unaffected = [f["rule"] for f in findings if f["status"] == "not_applicable"]
    if report["verdict"] == "fail":
        broken = broken or [f["rule"] for f in findings if f["status"] == "fail"]
        rules = len(set(broken))
        many = "1 rule is broken" if rules == 1 else f"{rules} rules are broken"
        places = f" in {len(broken)} places" if len(broken) > rules else ""
        return f"{many}{places}: {_some(broken)}."
    if report["verdict"] in ("inconclusive", "error"):
        return f"Nothing was found wrong, but {_count(unsure, 'rule')} could not be checked: {_some(unsure)}."
    if report["verdict"] == "no_findings":
        return f"No findings in {report['limits']}."
    left = f"; {_count(unsure, 'rule')} not checked and not required: {_some(unsure)}" if unsure else ""
    left += f"; {_count(report['skipped'], 'rule')} left out" if report["skipped"] else ""
    left += f"; {_count(unaffected, 'rule')} not applicable" if unaffected else ""
    if not held and unaffected:
        return f"Nothing was checked{left}."
    limits = f" Simulated: {report['limits']}." if report["tier"] == "simulate" else ""
    return f"None of {_count(held, 'rule')} is broken{left}.{limits}"


def _some(names: list[str], most: int = 3) -> str:
    names = list(dict.fromkeys(names))
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _count(things: Sized, name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


def _brief(text: str, most: int = 300) -> str:
    return text if len(text) <= most else f"{text[:most]} ..."


def _reasons(report: Report) -> dict[str, list[str]]:
    """{reason: the rules that are open for it}."""
    reasons: dict[str, list[str]] = {}
    for finding in report["findings"]:
        if finding["status"] == "inconclusive":
            name = finding["rule"] if finding["required"] else f"{finding['rule']} (not required)"
            reasons.setdefault(finding["evidence"], []).append(name)
    return reasons


def _visible(most: int, markup: type[str]) -> Callable[[Any], Any]:
    """What every value goes through before it is escaped."""

    def shown(value: Any) -> Any:
        if value is None:
            return "\u2013"
        if not isinstance(value, str) or isinstance(value, markup):
            return value
        cut = f" ... ({len(value) - most:,} more characters; --report json=PATH has all)" if len(value) > most else ""
        return visible(value[:most]) + cut

    return shown
