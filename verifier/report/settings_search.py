"""An exploration of settings as text, and as JSON data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ..analysis.settings_search import (
    ALLOWANCE,
    CLOSE,
    EXPANDABLE,
    NO,
    Candidate,
    Explored,
    frontier,
    ordered,
    recommended,
    smallest,
)
from ..analysis.wording import count
from .capacity import flops, seconds, size, table
from .wrapping import wrapped

ROWS, REASONS = 16, 3
SETTING = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
GIVEN = "as given"
_SPARE = f"{ALLOWANCE:.0%} to spare"


def text(found: Explored, spec: str = "") -> str:
    """The table, and what it recommends.

    `spec`: the file whose keys the settings are; "" if they are arguments of a script.
    """
    rows = ordered(found.candidates)
    lines = [summary(found)]
    if rows:
        front, best = frontier(found.candidates), recommended(found.candidates)
        shown = rows[:ROWS]
        shown += [one for one in rows[ROWS:] if one is found.candidates[0] or one is best]
        marks = [(">" if one is best else " ") + ("*" if one in front else " ") for one in shown]
        cells = [
            header(found),
            *([mark, *row(one, found)] for mark, one in zip(marks, shown, strict=True)),
        ]
        lines += table(cells, words=(0, len(cells[0]) - 1))
        lines += (
            [f"  and {len(rows) - len(shown)} more (--json has all)"]
            if len(rows) > len(shown)
            else []
        )
        lines += wrapped(
            "*: no other one needs less memory and no more time. >: recommended.", "", "  "
        )
    for reason, number in refused(found)[:REASONS]:
        lines += wrapped(f"not possible, {number} x: {reason}", "", "  ")
    return "\n".join([*lines, "", *advice(found, spec)])


def summary(found: Explored) -> str:
    """How many were tried of how many."""
    late = ", then the time was up (--timeout)" if found.out_of_time else ""
    return (
        f"{count(len(found.candidates), 'choice')} of settings that change no mathematics, of"
        f" {found.possible:,}{late}:"
    )


def header(found: Explored) -> list[str]:
    """The titles of the columns."""
    fits = [f"fits in {size(found.memory)}"] if found.memory is not None else []
    times = (
        ["step at least", "exposed", "tokens/s"]
        if found.gpu
        else ["waits for", "recomputes", "sends"]
    )
    return ["", "memory", "expandable", *fits, *times, "settings"]


def row(one: Candidate, found: Explored) -> list[str]:
    """The cells of a candidate that was measured, without the mark."""
    measured = one.measured
    assert measured is not None, "only of a candidate that was measured"
    fits = [fit(one)] if found.memory is not None else []
    if one.bound is not None:
        speed = one.bound.tokens_per_second
        times = [
            seconds(one.bound.step),
            seconds(one.bound.exposed + one.bound.waited),
        ]
        times.append(f"{speed:,.0f}" if speed else "-")
    else:
        times = [size(one.waited), flops(one.recomputed) if one.recomputed else "-", size(one.sent)]
    return [
        size(measured.needed),
        size(measured.expandable),
        *fits,
        *times,
        settings(one.settings, found),
    ]


def fit(one: Candidate) -> str:
    """Whether it fits, and by how much."""
    measured = one.measured
    assert measured is not None and measured.memory is not None, "only of a candidate with a device"
    answer = one.fits()
    if answer == NO:
        return f"no, {size(measured.expandable - measured.memory)} more"
    if answer == EXPANDABLE:
        return f"expandable, {size(measured.memory - measured.expandable)} left"
    return f"yes, {size(measured.memory - measured.needed)} left"


def settings(keys: Mapping[str, str], found: Explored) -> str:
    """The settings in short: keys without their section, and without those that all have."""
    return (
        ", ".join(
            f"{key.rpartition('.')[2]} {value}".strip() for key, value in own(keys, found).items()
        )
        or GIVEN
    )


def own(keys: Mapping[str, str], found: Explored) -> dict[str, str]:
    """The settings without those that all candidates have, such as the nodes for another number of
    ranks.
    """
    rows = [one.settings for one in found.candidates if one.measured is not None]
    common = set.intersection(*(set(row.items()) for row in rows)) if len(rows) > 1 else set()
    return {key: value for key, value in keys.items() if (key, value) not in common}


def refused(found: Explored) -> list[tuple[str, int]]:
    """Why some could not be tried, and how many."""
    return Counter(one.refused for one in found.candidates if one.measured is None).most_common()


def advice(found: Explored, spec: str) -> list[str]:
    """The recommended one, with the edit that makes it."""
    if found.memory is None:
        return wrapped(
            "With --device-memory or --gpu one of them is recommended: the fastest that fits."
        )
    best = recommended(found.candidates)
    if best is None or best.measured is None:
        return _nothing_fits(found)
    basis = "the least to wait for and to recompute (--gpu weighs them)"
    if found.gpu:
        basis = f"the least traffic of what has a bound within {CLOSE:.0%} of the fastest"
    alone = "nothing fits without offload, " if best.last else ""
    why = (
        f"recommended: {settings(best.settings, found)}: {alone}{basis} that fits with {_SPARE},"
        f" {size(best.memory)}"
    )
    lines = wrapped(why, "", "  ")
    if best.settings:
        lines += (
            [f"in {spec}:", *edit(best.settings)]
            if spec
            else [f"arguments: {_arguments(best.settings)}"]
        )
    if best.offload:
        lines += wrapped(
            "the host must hold weights, gradients and optimizer state of all its ranks, in pinned"
            " memory"
        )
    if best.fits(ALLOWANCE) == EXPANDABLE:
        lines += wrapped(
            f"with {SETTING} in the environment: by default it needs {size(best.measured.needed)}"
        )
    return lines


def _nothing_fits(found: Explored) -> list[str]:
    """Which one comes closest, and what else there is to change."""
    least = smallest(found.candidates)
    if least is None or least.measured is None:
        return ["none of them could be tried to the end of its second step"]
    return wrapped(
        f"none of them fits with {_SPARE}: {settings(least.settings, found)} needs least,"
        f" {size(least.memory)}. Take more ranks to shard over, GPUs with more memory, or a"
        " smaller model or sequence."
    )


def edit(keys: Mapping[str, str]) -> list[str]:
    """The keys as the lines of a spec."""
    sections: dict[str, dict[str, str]] = {}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    lines = []
    for section, values in sections.items():
        lines += [f"  {section}:", *(f"    {name}: {value}" for name, value in values.items())]
    return lines


def _arguments(keys: Mapping[str, str]) -> str:
    return " ".join(f"{key} {value}".strip() for key, value in keys.items() if value != "False")


def data(found: Explored) -> dict[str, Any]:
    """The exploration as JSON data; rows in the order of the text."""
    front, best = frontier(found.candidates), recommended(found.candidates)
    return {
        "possible": found.possible,
        "tried": len(found.candidates),
        "out_of_time": found.out_of_time,
        "allowance": ALLOWANCE,
        "rows": [
            {
                "settings": dict(one.settings),
                "given": one is found.candidates[0],
                "frontier": one in front,
                "recommended": one is best,
                "fits": one.fits(),
                "peak": (
                    one.measured.highest.bytes if one.measured and one.measured.highest else None
                ),
                "needed": one.measured.needed if one.measured else None,
                "expandable": one.memory,
                "offload": one.offload,
                "bound": one.bound.step if one.bound else None,
                "exposed": one.bound.exposed + one.bound.waited if one.bound else None,
                "tokens_per_second": one.bound.tokens_per_second if one.bound else None,
                "waited_bytes": one.waited,
                "sent_bytes": one.sent,
                "recomputed_flops": one.recomputed,
            }
            for one in ordered(found.candidates)
        ],
        "refused": [
            {"settings": dict(one.settings), "why": one.refused}
            for one in found.candidates
            if one.measured is None
        ],
    }
