"""A plan as one self-contained HTML file: whether it fits, memory over time, traffic, the bound,
and the settings that were compared.
"""

from __future__ import annotations

from typing import Any

from ..analysis.capacity import RESERVE, CapacityPlan, by_part, totals
from ..analysis.roofline import Bound
from ..analysis.settings_search import Explored, frontier, ordered, recommended
from ..trace.events import CapacityRecord, Peak, Place
from . import capacity_plots, settings_search
from .capacity import flops, host_copy, mfu, outcome, place, seconds, size
from .html import SIZES, environment
from .html_tables import Table
from .sanitize import in_xml

SYMBOLS = {
    "fits": "\u2713",
    "does not fit": "\u2717",
    "tight": "?",
    "not followed": "?",
    "error": "!",
    "planned": "\u2013",
}
TONES = {
    "fits": "pass",
    "does not fit": "fail",
    "error": "fail",
    "tight": "inconclusive",
    "not followed": "inconclusive",
}
ROWS, TEXT = SIZES[1]


def render(
    found: CapacityPlan,
    name: str,
    command: str,
    least: Bound | None,
    compared: Explored | None,
    spec: str,
) -> str:
    """The page.

    `command`: the line that makes it again; `spec`: the file whose keys the compared settings are.
    """
    word = verdict(found)
    page = environment(TEXT).get_template("plan.html.j2")
    return in_xml(
        page.render(
            word=word,
            symbol=SYMBOLS[word],
            tone=TONES.get(word, "no_findings"),
            sentence=outcome(found),
            name=name,
            command=command,
            found=found,
            record=found.record,
            top=found.highest,
            place=place,
            size=size,
            seconds=seconds,
            mfu=mfu,
            host_copy=host_copy,
            reserve=RESERVE,
            bound=least,
            tables=tables(found, least, compared),
            figures=_figures(found, compared),
            compared=compared,
            summary=settings_search.summary(compared) if compared is not None else "",
            advice=settings_search.advice(compared, spec) if compared is not None else [],
            refused=settings_search.refused(compared) if compared is not None else [],
            rows=ROWS,
        )
    )


def _figures(found: CapacityPlan, compared: Explored | None) -> dict[str, dict[str, Any]]:
    """The plots that have something to show, by name."""
    from markupsafe import Markup

    made = {}
    if found.record is not None and found.record.course:
        made["memory"] = capacity_plots.memory(found.record, found.memory)
    if compared is not None and ordered(compared.candidates):
        made["settings"] = capacity_plots.settings(compared)
    return {name: {**figure, "svg": Markup(figure["svg"])} for name, figure in made.items()}


def verdict(found: CapacityPlan) -> str:
    """One word for the top of the page."""
    if found.trouble is not None:
        return "not followed" if found.trouble.unfollowed else "error"
    if found.tight:
        return "tight"
    return "planned" if found.fits is None else "fits" if found.fits else "does not fit"


def tables(found: CapacityPlan, least: Bound | None, compared: Explored | None) -> dict[str, Table]:
    """Every table that has rows, by name."""
    record = found.record
    made: dict[str, Table] = {}
    if record is not None:
        made |= {
            "peaks": _peaks(record.peaks),
            "collectives": _collectives(record),
            "flops": _flops(record),
            "reads": _reads(record),
        }
    if least is not None:
        made["bound"] = _bound(least)
    if compared is not None:
        made["explored"] = _explored(compared)
    return {name: table for name, table in made.items() if table.rows}


def _peaks(peaks: list[Peak]) -> Table:
    most: dict[str, int] = {}
    for peak in peaks:
        for kind, amount in peak.kinds.items():
            most[kind] = max(most.get(kind, 0), amount)
    rows: list[list[Any]] = [
        [kind, *(size(peak.kinds[kind]) if kind in peak.kinds else None for peak in peaks)]
        for kind in sorted(most, key=lambda kind: -most[kind])
    ]
    rows.append(["all tensors", *(size(peak.bytes) for peak in peaks)])
    rows.append(
        ["reserved by the allocator", *(size(max(peak.reserved, peak.bytes)) for peak in peaks)]
    )
    rows.append(
        ["with expandable segments", *(size(max(peak.expandable, peak.bytes)) for peak in peaks)]
    )
    rows.append(["reached at", *(_line(peak.at_line) for peak in peaks)])
    return Table(
        "Memory at the peak of each phase",
        "Kind" + "".join(f"|>{peak.phase}" for peak in peaks),
        rows,
    )


def _collectives(record: CapacityRecord) -> Table:
    rows = [
        [
            one.collective,
            one.group,
            one.group_size,
            one.dtype,
            one.phase,
            one.purpose or None,
            f"{count:,}",
            size(amount),
        ]
        for one, count, amount in totals(record)
    ]
    columns = "Collective|Group|>Ranks|Dtype|In|Of FSDP, for|>Number|>Bytes"
    return Table("Collectives of a step", columns, rows)


def _flops(record: CapacityRecord) -> Table:
    parts = {
        key: dict(by_part({name: getattr(one, key) for name, one in record.flops.items()}))
        for key in ("forward", "backward", "recompute")
    }
    total = sum(parts["forward"].values()) + sum(parts["backward"].values())
    rows = []
    for name, amount in by_part(
        {name: one.forward + one.backward for name, one in record.flops.items()}
    ):
        again = parts["recompute"][name]
        own = [
            flops(parts["forward"][name]),
            flops(parts["backward"][name]),
            flops(again) if again else None,
        ]
        rows.append([name, *own, f"{amount / max(total, 1):.0%}"])
    return Table(
        "FLOPs of a step by part of the model",
        "Part|>Forward|>Backward|>Of it recomputed|>Of all",
        rows if total else [],
    )


def _reads(record: CapacityRecord) -> Table:
    rows = [[_line(read.at_line), read.what, f"{read.count:,}"] for read in record.waits]
    return Table(
        f"Lines that wait for the device, in {record.steps} steps", "Line|What|>Times", rows
    )


def _bound(least: Bound) -> Table:
    parts = [
        ("compute, at the best rate of products", least.compute),
        ("collectives that the next operator waits for", least.waited),
        ("first and last collective of FSDP", least.exposed),
        ("optimizer, reading and writing its state", least.optimizer),
        ("all traffic on the link inside a node, beside compute", least.link),
        ("all traffic on the network, beside compute", least.network),
        ("a step, at least", least.step),
    ]
    rows: list[list[Any]] = [[name, seconds(amount) if amount else None] for name, amount in parts]
    return Table("What the least time of a step is made of", "Part|>Time", rows)


def _explored(compared: Explored) -> Table:
    front, best = frontier(compared.candidates), recommended(compared.candidates)
    rows = []
    for number, one in enumerate(ordered(compared.candidates), 1):
        *cells, _ = settings_search.row(one, compared)
        marks = ", ".join(
            word
            for word, there in (("recommended", one is best), ("frontier", one in front))
            if there
        )
        keys = (
            ", ".join(
                f"{key} {value}".strip()
                for key, value in settings_search.own(one.settings, compared).items()
            )
            or settings_search.GIVEN
        )
        rows.append([str(number), keys, marks or None, *cells])
    titles = "".join(
        f"|>{title[0].upper()}{title[1:]}" for title in settings_search.header(compared)[1:-1]
    )
    columns = f"Row|Settings|Which{titles}"
    return Table("Settings that change no mathematics", columns, rows)


def _line(at: Place | None) -> str | None:
    return f"{at.file.rpartition('/')[2]}:{at.line}" if at is not None else None
