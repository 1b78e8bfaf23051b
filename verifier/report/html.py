"""One self-contained HTML file: the verdict, then what failed, what could not be checked, and what
was measured.

Whatever comes from the script is data: every string is cut, made visible and escaped on its way
into the template.
"""

import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..analysis.wording import count, some
from ..verdict import Verdict
from . import html_plots, html_tables
from .json_report import as_dict
from .sanitize import in_xml, shown
from .text import SUGGESTED, by_reason, judged_or_not

if TYPE_CHECKING:
    import jinja2

LIMIT = 1_000_000  # bytes
SIZES = (
    (2_500, 4_000),
    (2_500, 1_000),
    (1_000, 1_000),
    (250, 500),
    (40, 60),
)  # rows of a table, characters of a text
Report = dict[str, Any]
_SYMBOLS = {
    "pass": "\u2713",
    "fail": "\u2717",
    "inconclusive": "?",
    "error": "!",
    "no_findings": "\u2013",
}


def render(verdict: Verdict) -> str:
    """The page, at most about a megabyte: what is too long is cut, and says so."""
    report = as_dict(verdict)
    figures = html_plots.figures(report)
    for rows, text in SIZES:
        page = in_xml(_page(report, verdict.partial, figures, rows, text))
        if len(page.encode("utf-8")) <= LIMIT:
            break
    return page


def _page(report: Report, partial: str, figures: list[Report], rows: int, text: int) -> str:
    from markupsafe import Markup

    failed = [f for f in report["findings"] if f["status"] in ("fail", "error")]
    unsure = [f for f in report["findings"] if f["status"] == "inconclusive"]
    drawn = [{**figure, "svg": Markup(figure["svg"])} for figure in figures]
    return (
        environment(text)
        .get_template("report.html.j2")
        .render(
            report=report,
            symbol=_SYMBOLS[report["verdict"]],
            sentence=partial or sentence(report),
            failed=[f for f in failed if not f["consequence"]],
            followers=[f for f in failed if f["consequence"]],
            reasons=by_reason(
                (f["rule"] + ("" if f["required"] else " (not required)"), f["evidence"])
                for f in unsure
            ),
            suggested=SUGGESTED,
            horizon=judged_or_not(report["facts"]),
            tables=html_tables.tables(report),
            figures=drawn,
            rows=rows,
            articles=rows // 10,
            place=html_tables.place,
            brief=_brief,
            count=count,
        )
    )


def environment(text: int) -> "jinja2.Environment":
    """The templates of pages; a text has at most so many characters."""
    import jinja2
    from markupsafe import Markup

    return jinja2.Environment(
        loader=jinja2.FunctionLoader(
            lambda name: (pkgutil.get_data(__name__, name) or b"").decode()
        ),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_visible(text, Markup),
        trim_blocks=True,
        lstrip_blocks=True,
    )


def sentence(report: Report) -> str:
    """The verdict in one sentence."""
    findings = report["findings"]

    def rules(*statuses: str) -> list[str]:
        return [f["rule"] for f in findings if f["status"] in statuses]

    unsure, passed, unaffected = (
        rules("inconclusive", "error"),
        rules("pass"),
        rules("not_applicable", "not_covered"),
    )
    if report["verdict"] == "fail":
        decides = [f for f in findings if f["status"] == "fail" and f["required"]]
        failed = [f["rule"] for f in decides if not f["consequence"]] or [
            f["rule"] for f in decides
        ]
        places = f" in {len(failed)} places" if len(failed) > len(set(failed)) else ""
        return f"{count(len(set(failed)), 'rule')} failed{places}: {some(dict.fromkeys(failed))}."
    if report["verdict"] in ("inconclusive", "error"):
        return (
            f"Nothing failed, but {count(len(unsure), 'rule')} could not be checked:"
            f" {some(dict.fromkeys(unsure))}."
        )
    if report["verdict"] == "no_findings":
        return f"No findings in {report['limits']}."
    open_rules = (
        f"{count(len(unsure), 'rule')} not checked and not required: {some(dict.fromkeys(unsure))}"
    )
    left = f"; {open_rules}" if unsure else ""
    warnings = [f["rule"] for f in findings if f["status"] == "fail" and not f["required"]]
    left += (
        f"; {count(len(warnings), 'warning')}: {some(dict.fromkeys(warnings))}" if warnings else ""
    )
    left += f"; {count(len(report['skipped']), 'rule')} skipped" if report["skipped"] else ""
    left += f"; {count(len(unaffected), 'rule')} not applicable" if unaffected else ""
    if not passed and unaffected:
        return f"Nothing was checked{left}."
    limits = f" Simulated: {report['limits']}." if report["tier"] == "simulate" else ""
    return f"{count(len(passed), 'rule')} passed, none failed{left}.{limits}"


def _brief(text: str, most: int = 300) -> str:
    return text if len(text) <= most else f"{text[:most]} ..."


def _visible(most: int, markup: type[str]) -> Callable[[Any], Any]:
    """What every value goes through before it is escaped: cut at `most` characters, unprintable
    characters as escapes.
    """

    def visible(value: Any) -> Any:
        if value is None:
            return "\u2013"
        if not isinstance(value, str) or isinstance(value, markup):
            return value
        cut = (
            f" ... ({len(value) - most:,} more characters; --report json=PATH has all)"
            if len(value) > most
            else ""
        )
        return shown(value[:most]) + cut

    return visible
