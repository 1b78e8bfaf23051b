"""Settings compared: which are on the frontier, which is recommended, in which order they are
tried, by made-up figures.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from test_bound import GPU, flops, sent

from verified_fsdp2.skill.capacity.candidates import Choice, Knob, Search
from verified_fsdp2.skill.capacity.settings import as_arguments, of_arguments
from verified_fsdp2.verifier.analysis.capacity import RESERVE, CapacityPlan
from verified_fsdp2.verifier.analysis.roofline import HOST_MEMORY, bound, offloaded
from verified_fsdp2.verifier.analysis.settings_search import (
    EXPANDABLE,
    NO,
    YES,
    Candidate,
    Explored,
    accumulated,
    frontier,
    ordered,
    recommended,
)
from verified_fsdp2.verifier.errors import UserError
from verified_fsdp2.verifier.report import settings_search
from verified_fsdp2.verifier.trace.events import CapacityRecord, Peak

GIB = 1 << 30
DEVICE = replace(GPU, memory_bandwidth=1e15)


def candidate(
    memory: float,
    work: float,
    device: float | None = 24,
    holes: float = 0.0,
    gpu: bool = True,
    **settings: Any,
) -> Candidate:
    """One that needs so many GiB with expandable segments, and `holes` more without; `work`: its
    least seconds.
    """
    tensors = int(memory * GIB) - RESERVE
    peak = Peak(
        phase="later steps",
        bytes=tensors,
        reserved=tensors + int(holes * GIB),
        expandable=tensors,
        kinds={"optimizer state": tensors // 4, "activations": tensors - tensors // 4},
        module="",
        at_line=None,
    )
    record = CapacityRecord(
        world_size=8, steps=2, peaks=[peak], flops={"": flops(forward=int(work * 1000))}
    )
    found = CapacityPlan(record, None, int(device * GIB) if device else None, 1.0)
    offload = settings.get("offload") is True
    keys = {name: str(value) for name, value in settings.items()}
    return Candidate(keys, found, bound(record, DEVICE) if gpu else None, offload)


def test_the_frontier_has_what_no_other_one_beats() -> None:
    lean, fast, middle, beaten = (
        candidate(m, w) for m, w in ((10, 40), (30, 20), (20, 30), (25, 35))
    )
    assert frontier([fast, beaten, lean, middle]) == [lean, middle, fast]


def test_times_that_differ_by_little_are_equal() -> None:
    lean, larger = candidate(10, 20.01), candidate(20, 20.0)
    assert frontier([larger, lean]) == [lean]


def test_recommended_is_the_fastest_that_fits_with_an_allowance() -> None:
    lean, fits, tight, far = (
        candidate(m, w) for m, w in ((10, 40), (22.8, 30), (23.5, 25), (40, 10))
    )
    assert recommended([far, tight, fits, lean]) is fits
    assert [one.fits() for one in (lean, fits, tight, far)] == [YES, YES, YES, NO]
    assert recommended([far]) is None
    assert ordered([far, lean, tight]) == [tight, lean, far]


def test_holes_of_the_allocator_can_be_avoided() -> None:
    one = candidate(20, 30, holes=6)
    assert one.fits() == EXPANDABLE and recommended([one]) is one
    assert settings_search.SETTING in "\n".join(
        settings_search.advice(Explored((one,), 1, 24 * GIB, "gpu"), "spec.yaml")
    )


def test_of_close_bounds_the_one_with_less_traffic_is_recommended() -> None:
    """A bound does not show which of two is faster that differ by less than what it leaves out."""

    def sending(work: float, size: int, purpose: str = "parameters") -> Candidate:
        one = candidate(20, work)
        assert one.found is not None
        record = replace(one.record, collectives=[sent(bytes=size, purpose=purpose)])
        return replace(one, found=replace(one.found, record=record))

    waits, sends, less, slow = (
        sending(100, 10, ""),
        sending(102, 900),
        sending(103, 500),
        sending(110, 1),
    )
    assert recommended([waits, sends, less, slow]) is less
    assert recommended([waits, slow]) is waits
    assert recommended([replace(less, offload=True), sends]) is sends
    text = "\n".join(settings_search.advice(Explored((less,), 1, 24 * GIB, "gpu"), "spec.yaml"))
    assert "within 5% of the fastest" in " ".join(text.split())


def test_offload_is_for_what_fits_in_no_other_way() -> None:
    """Without the rates of a GPU nothing says what its copies cost."""
    slow, moved, large = (
        candidate(20, 90, gpu=False),
        candidate(8, 10, gpu=False, offload=True),
        candidate(40, 10),
    )
    assert recommended([slow, moved, large]) is slow
    assert recommended([moved, large]) is moved
    assert frontier([slow, moved]) == [slow]
    known = candidate(8, 10, offload=True)
    assert recommended([candidate(20, 90), known]) is known


def test_offload_pays_for_its_copies() -> None:
    """Gathered in bfloat16 from float32 shards, reduced in float32; over PCIe beside the
    collectives; updated on the host.
    """
    gathered = sent(purpose="parameters", bytes=800, count=2)
    reduced = sent(
        "reduce_scatter", purpose="gradients", phase="backward", bytes=1600, dtype="float32"
    )
    record = CapacityRecord(
        world_size=8, steps=2, collectives=[gathered, reduced], flops={"": flops(forward=100_000)}
    )
    nvlink, pcie = DEVICE, replace(DEVICE, link_kind="PCIe 4.0 x16", link=10.0)
    copied = 2 * 800 * 2 / 8 + 1600 / 8
    least = bound(record, pcie)
    found = offloaded(least, record, pcie, parameters=100)
    assert found.link == pytest.approx(least.link + copied / 10)
    assert found.optimizer == pytest.approx(28 * 100 * 8 / HOST_MEMORY)
    assert (
        found.step == pytest.approx(max(least.step, found.link) + found.optimizer)
        and found.step > least.step
    )
    assert found.limited_by == "communication"
    other = bound(record, nvlink)
    assert offloaded(other, record, nvlink, 0).step == pytest.approx(
        other.step
    )  # hidden beside compute


def test_without_rates_recomputation_and_traffic_are_compared() -> None:
    plain = candidate(20, 10, gpu=False)
    record = plain.record

    def other(memory: float, recompute: int, bytes: int) -> Candidate:
        one = candidate(memory, 10, gpu=False)
        sends = sent(bytes=bytes, purpose="parameters")
        changed = replace(
            one.record,
            flops={"": flops(forward=10, backward=20, recompute=recompute)},
            collectives=[sends],
        )
        assert one.found is not None
        return replace(one, found=replace(one.found, record=changed))

    again, sends, worse = other(10, 500, 100), other(12, 0, 900), other(15, 500, 900)
    assert record.collectives == [] and plain.cost() == (0, 0, 0)
    assert [(one.recomputed, one.sent) for one in (again, sends)] == [(500, 100), (0, 900)]
    assert frontier([again, sends, worse]) == [again, sends]


def test_accumulation_counts_what_each_forward_pass_sends() -> None:
    """Two passes: gathered in both, reduced in both or in the last one only; the norm once."""
    gathered = sent(purpose="parameters", count=4, in_first=2)
    kept = sent(
        purpose="parameters", count=2, in_first=2, bytes=8
    )  # stays gathered until the last backward
    reduced = sent("reduce_scatter", purpose="gradients", phase="backward", count=4, in_first=2)
    last = sent("all_reduce", purpose="gradients", phase="backward", count=3, in_first=0)
    norm = sent("all_reduce", phase="other", count=1)
    record = CapacityRecord(
        world_size=8,
        steps=2,
        tokens=20,
        collectives=[gathered, kept, reduced, last, norm],
        flops={"": flops(forward=10, backward=30, recompute=10, masked=4)},
    )
    found = accumulated(record, 7)
    assert [one.count for one in found.collectives] == [14, 2, 14, 3, 1]
    assert found.tokens == 70
    assert found.flops[""] == flops(forward=35, backward=105, recompute=35, masked=14)
    assert accumulated(record, 2) is record


class World:
    """What made-up settings need: memory and time by factors, and what is asked for."""

    def __init__(
        self, memory: float | None, most: int, last: str = "", refuses: Sequence[Choice] = ()
    ) -> None:
        self.asked: list[dict[str, Any]] = []
        self.rounds = 0
        self.refuses = refuses
        knobs = [
            Knob("ac", ("none", "full")),
            Knob("micro", (4, 1, 2)),
            Knob("tp", (1, 2)),
            Knob("offload", (False, True)),
        ]
        self.memory = memory
        self.search = Search(
            knobs, self.measure, most, 2, int(memory * GIB) if memory else None, last
        )

    def measure(self, choices: Sequence[Choice]) -> list[Candidate | None]:
        self.rounds += 1
        self.asked += [dict(choice) for choice in choices]
        return [None if self.rounds > 50 else self.one(choice) for choice in choices]

    def one(self, choice: Choice) -> Candidate:
        if any(choice.items() >= refused.items() for refused in self.refuses):
            return Candidate({}, refused="not possible")
        activations = 8 * choice["micro"] * (0.2 if choice["ac"] == "full" else 1) / choice["tp"]
        state = 0.5 if choice["offload"] else 12
        work = 20 * (1.33 if choice["ac"] == "full" else 1) * (1.5 if choice["tp"] > 1 else 1)
        work *= 3 if choice["offload"] else 1
        return candidate(1 + state + activations, work, self.memory, **choice)


def test_all_are_tried_where_they_are_few() -> None:
    world = World(24, most=24)
    assert len(world.search.run()) == 24 == world.search.possible
    assert world.rounds == 1


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (100, {"ac": "none", "micro": 4, "tp": 1}),  # all fits: nothing is given for memory
        (30, {"ac": "none", "micro": 2, "tp": 1}),
        (21, {"ac": "full", "micro": 4, "tp": 1}),
        (15.5, {"ac": "full", "micro": 1, "tp": 1}),
    ],
)
def test_the_search_finds_the_best_that_fits(memory: float, expected: dict[str, Any]) -> None:
    world = World(memory, most=14, last="offload")
    best = recommended(world.search.run())
    assert best is not None and best.measured is not None
    every = recommended(
        [world.one(choice) for choice in map(world.search.choice, _points(world.search))]
    )
    assert every is not None and best.cost() == every.cost()
    assert best.settings["ac"] == expected["ac"] and best.settings["tp"] == str(expected["tp"])
    assert sum(choice["offload"] for choice in world.asked) == 1  # alone, to be shown


EXTREMES = ({"ac": "full", "micro": 1}, {"ac": "full", "micro": 1, "offload": True})


@pytest.mark.parametrize(("memory", "tried"), [(15.5, 2), (6, 3)])
def test_the_cheapest_extreme_is_tried_first_where_the_given_one_does_not_fit(
    memory: float, tried: int
) -> None:
    world = World(memory, most=14)
    world.search.extremes = EXTREMES
    found = world.search.run()
    asked = [{key: choice[key] for key in EXTREMES[-1]} for choice in world.asked]
    assert asked[1:tried] == [{"offload": False, **one} for one in EXTREMES[: tried - 1]]
    best = recommended(found)
    every = recommended(
        [world.one(choice) for choice in map(world.search.choice, _points(world.search))]
    )
    assert best is not None and every is not None and best.cost() == every.cost()


def test_an_extreme_helps_where_the_given_one_cannot_be_tried() -> None:
    world = World(15.5, most=14, refuses=[{"micro": 4}])
    world.search.extremes = EXTREMES
    assert recommended(world.search.run()) is not None
    assert {"ac": "full", "micro": 1, "tp": 1, "offload": False} in world.asked[:2]


def test_the_given_one_is_not_tried_again() -> None:
    world = World(30, most=24)
    given = world.one(world.search.choice((0, 0, 0, 0)))
    world.search.given = given
    found = world.search.run()
    assert found[0] is given and len(world.asked) == len(found) - 1 == 23


def test_offload_beside_others_comes_last() -> None:
    world = World(6, most=20, last="offload")
    best = recommended(world.search.run())
    assert best is not None and best.offload
    first = next(
        n for n, choice in enumerate(world.asked) if choice["offload"] and choice["ac"] == "full"
    )
    assert {"ac": "full", "micro": 1, "tp": 2, "offload": False} in world.asked[:first]


def test_the_number_is_kept() -> None:
    world = World(6, most=9, last="offload")
    assert len(world.search.run()) == len(world.asked) == 9


def test_what_is_not_possible_is_not_combined() -> None:
    world = World(15, most=24, last="offload", refuses=[{"micro": 1}])
    found = world.search.run()
    assert [choice for choice in world.asked if choice["micro"] == 1] == [
        {"ac": "none", "micro": 1, "tp": 1, "offload": False}
    ]
    assert settings_search.refused(Explored(tuple(found), 24, None)) == [("not possible", 1)]


def test_without_a_device_the_frontier_is_followed() -> None:
    world = World(None, most=24, last="offload")
    front = frontier(world.search.run())
    assert [(one.settings["ac"], one.settings["micro"], one.settings["tp"]) for one in front] == [
        ("full", "1", "2"),
        ("full", "1", "1"),
        ("none", "1", "1"),
    ]


def test_a_given_choice_that_fails_ends_it() -> None:
    world = World(24, most=14, last="offload", refuses=[{"micro": 4}])
    found = world.search.run()
    assert (
        len(found) == len(world.asked) and recommended(found) is not None
    )  # each change alone was tried


def _points(search: Search) -> list[tuple[int, ...]]:
    from itertools import product

    return list(product(*(range(len(knob.values)) for knob in search.knobs)))


def test_a_grid_of_arguments() -> None:
    knobs = of_arguments(["--batch 1,2,4", "--ac=none,full", "--compile"])
    assert knobs == [
        Knob("--batch", ("1", "2", "4")),
        Knob("--ac", ("none", "full")),
        Knob("--compile", (False, True)),
    ]
    assert as_arguments({"--batch": "2", "--compile": True}) == ["--batch", "2", "--compile"]
    assert as_arguments({"--batch": "1", "--compile": False}) == ["--batch", "1"]
    assert as_arguments({"data.batch": "1", "fast": True}) == ["data.batch=1", "fast"]


@pytest.mark.parametrize("text", ["--batch 1", "--batch 1,1", "--batch 1 2", "@ 1,2"])
def test_a_grid_that_compares_nothing_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--explore"):
        of_arguments([text])


def test_an_option_twice_is_refused() -> None:
    with pytest.raises(UserError, match="once"):
        of_arguments(["--batch 1,2", "--batch 4,8"])


def test_the_text_has_the_edit() -> None:
    keys = {"parallel.dp_shard": 8, "memory.chunked_loss": "true", "parallel.tp": 2}
    best, other = candidate(20, 10, **keys), candidate(30, 10)
    found = Explored((other, best), 12, 24 * GIB, "gpu")
    text = settings_search.text(found, "spec.yaml")
    assert "2 choices" in text and "of 12" in text
    assert text.endswith(
        "in spec.yaml:\n  parallel:\n    dp_shard: 8\n    tp: 2\n  memory:\n    chunked_loss: true"
    )
    data = settings_search.data(found)
    assert [
        (row["recommended"], row["frontier"], row["fits"], row["given"]) for row in data["rows"]
    ] == [
        (True, True, YES, False),
        (False, False, NO, True),
    ]
