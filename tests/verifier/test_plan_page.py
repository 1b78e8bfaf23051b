"""The page of a plan: sound HTML that loads nothing, with its plots, tables, errors and
settings.
"""

from dataclasses import replace
from typing import Any

import pytest
from test_bound import GPU, flops, sent
from test_explored import candidate
from test_html import HOSTILE, sound

from verified_fsdp2.verifier.analysis.capacity import CapacityPlan, Trouble
from verified_fsdp2.verifier.analysis.roofline import bound
from verified_fsdp2.verifier.analysis.settings_search import Explored
from verified_fsdp2.verifier.report import capacity_html
from verified_fsdp2.verifier.report.capacity_plots import OTHERS, memory
from verified_fsdp2.verifier.trace.events import CapacityRecord, Moment, Peak, Place, Read

GIB = 1 << 30
LINE = Place(file="/a/train.py", line=7, function="main", code="loss.backward()")


def record(**more: Any) -> CapacityRecord:
    kinds = {"activations": 8 * GIB, "sharded parameters": 2 * GIB, "optimizer state": 4 * GIB}
    course = [
        Moment(phase="initialisation", bytes=2 * GIB, kinds={"sharded parameters": 2 * GIB}),
        *(
            Moment(phase="first step", bytes=n * GIB, kinds={"activations": n * GIB})
            for n in range(1, 5)
        ),
        *(Moment(phase="later steps", bytes=14 * GIB, kinds=kinds) for _ in range(4)),
    ]
    peak = Peak(
        phase="later steps",
        bytes=14 * GIB,
        reserved=16 * GIB,
        expandable=15 * GIB,
        kinds=kinds,
        module="",
        at_line=LINE,
    )
    values: dict[str, Any] = {
        "peaks": [peak],
        "course": course,
        "collectives": [sent(purpose="parameters", count=4)],
        "flops": {"blocks.0.up": flops(forward=100_000, backward=200_000)},
        "reads": [Read(what="item()", count=3, in_step=True, synchronizes=True, at_line=LINE)],
        "mesh": {"dp_shard": 8},
    }
    return CapacityRecord(world_size=8, steps=2, **{**values, **more})


def page(found: CapacityPlan, explored: Explored | None = None, name: str = "spec.yaml") -> str:
    least = bound(found.record, GPU) if found.record is not None else None
    return capacity_html.render(found, name, f"fsdp2 plan {name}", least, explored, "spec.yaml")


def tried(memory: float | None = 24, trouble: Trouble | None = None, **more: Any) -> CapacityPlan:
    return CapacityPlan(record(**more), trouble, int(memory * GIB) if memory else None, 1.0)


@pytest.mark.parametrize(
    ("memory", "word"), [(24, "fits"), (16, "tight"), (10, "does not fit"), (None, "planned")]
)
def test_the_verdict_is_at_the_top(memory: float | None, word: str) -> None:
    text = page(tried(memory))
    found = sound(text)
    assert "".join(found.text).partition("fsdp2 plan\n")[2].count(word) >= 1
    assert {"peak", "time", "work", "waits"} <= {tag.get("id", "") for _, tag in found.tags}
    assert "train.py:7" in text and "blocks.*.up" in text and "item()" in text


def test_an_error_has_its_line() -> None:
    trouble = Trouble("device", "tensors on two devices", LINE)
    text = page(tried(trouble=trouble))
    sound(text)
    assert "tensors on two devices" in text and "/a/train.py:7" in text
    nothing = CapacityPlan(None, replace(trouble, unfollowed="it needs values"), None, 1.0)
    assert "it needs values" in "".join(sound(page(nothing)).text)


def test_memory_is_drawn_by_kind_and_phase() -> None:
    figure = memory(record(), 16 * GIB)
    assert [name for name, _, _ in figure["legend"]] == [
        "activations",
        "sharded parameters",
        "optimizer state",
    ]
    assert figure["svg"].count('class="area"') == 3
    assert "first step" in figure["svg"] and "later steps" in figure["svg"]
    assert figure["svg"].count('class="limit"') == 1 and "the device: 16.0 GiB" in figure["svg"]
    far = memory(record(), 800 * GIB)
    assert 'class="limit"' not in far["svg"] and "800 GiB" in far["description"]


def test_areas_are_as_high_as_what_they_show() -> None:
    """The uppermost one reaches the total of each moment."""
    figure = memory(record(), None)
    paths = [line for line in figure["svg"].splitlines() if 'class="area"' in line]
    heights = [
        float(point.split()[1])
        for point in paths[-1].partition(' d="M')[2].rstrip('Z"/>').split("L")
    ]
    axis = {value: height for height, value in _ticks(figure["svg"])}
    assert min(heights) == pytest.approx(axis[0] - (axis[0] - axis[10]) * 1.4, abs=0.3)


def _ticks(svg: str) -> list[tuple[float, float]]:
    lines = [
        line
        for line in svg.splitlines()
        if line.startswith("<text") and 'text-anchor="end"' in line
    ]
    return [
        (float(line.split('y="')[1].split('"')[0]) - 4, float(line.split(">")[1].split("<")[0]))
        for line in lines
    ]


def test_many_kinds_share_a_colour_at_the_end() -> None:
    kinds = {f"kind {n}": n * GIB for n in range(1, 12)} | {"gradients": 1}
    course = [Moment(phase="later steps", bytes=sum(kinds.values()), kinds=kinds)]
    names = [name for name, _, _ in memory(record(course=course), None)["legend"]]
    assert len(names) == 8 and names[0] == OTHERS and names[-1] == "gradients"


def test_the_settings_have_a_plot_a_table_and_advice() -> None:
    best, far, plain = candidate(20, 10, tp=2), candidate(60, 20, ac="none"), candidate(23, 12)
    explored = Explored((plain, best, far), 12, 24 * GIB, "gpu")
    text = page(tried(), explored)
    found = sound(text)
    assert len(found.all("circle")) == 3
    assert "recommended: tp 2" in text and "3 choices" in text
    without = Explored(tuple(candidate(m, 10, device=None, gpu=False) for m in (5, 6)), 2, None)
    assert len(sound(page(tried(None), without)).all("circle")) == 2


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_what_a_script_says_is_text(text: str) -> None:
    place = Place(file=text, line=7, function=text, code=text)
    trouble = Trouble("other", text, place, text)
    one = candidate(20, 10, **{"--name": text})
    seen = replace(record().peaks[0], module=text, at_line=place)
    reads = [Read(what=text, count=3, in_step=True, synchronizes=True, at_line=place)]
    found = tried(trouble=trouble, peaks=[seen], reads=reads, flops={text: flops(forward=10)})
    sound(
        page(
            found,
            Explored((one, replace(one, found=None, refused=text)), 2, 24 * GIB, "gpu"),
            name=text,
        )
    )
