"""The bound on step time, by arithmetic: what each collective takes on each layout, and what
overlaps with what.
"""

from dataclasses import replace
from typing import Any

import pytest

from verified_fsdp2.verifier.analysis.roofline import bound, layout, rate, seconds, traffic
from verified_fsdp2.verifier.config.devices import Device, device
from verified_fsdp2.verifier.report.capacity import fastest
from verified_fsdp2.verifier.trace.events import CapacityRecord, Collective, ModuleFlops, Peak

GPU = Device(
    name="gpu",
    title="A GPU",
    memory=80 << 30,
    flops={"bfloat16": 1000.0, "float16": 1000.0, "tfloat32": 500.0, "float32": 50.0},
    memory_bandwidth=100.0,
    link=40.0,
    link_kind="NVLink",
    per_node=8,
    network=5.0,
    names=(),
    sources={},
)


def sent(collective: str = "all_gather", **more: Any) -> Collective:
    base = {
        "group": "dp",
        "group_size": 8,
        "stride": 1,
        "bytes": 800,
        "dtype": "bfloat16",
        "count": 1,
        "step": 2,
    }
    return Collective(
        **{
            "collective": collective,
            "module": "",
            "phase": "forward",
            "purpose": "",
            **base,
            **more,
        }
    )


def flops(**more: Any) -> ModuleFlops:
    return ModuleFlops(
        **{"forward": 0, "backward": 0, "recompute": 0, "masked": 0, "dtype": "bfloat16", **more}
    )


def tried(
    *collectives: Collective, flops: dict[str, ModuleFlops] | None = None, **more: Any
) -> CapacityRecord:
    return CapacityRecord(
        world_size=8, steps=2, collectives=list(collectives), flops=flops or {}, **more
    )


@pytest.mark.parametrize(
    ("size", "stride", "expected"),
    [
        (8, 1, (8, 1)),  # one node
        (64, 1, (8, 8)),
        (8, 8, (1, 8)),  # FSDP beside TP 8: one rank of the group in each node
        (32, 2, (4, 8)),
        (4, 2, (4, 1)),
        (2, 16, (1, 2)),  # HSDP: replicas in different nodes
        (12, 1, (8, 2)),
        (1, 1, (1, 1)),
    ],
)
def test_where_the_ranks_of_a_group_are(size: int, stride: int, expected: tuple[int, int]) -> None:
    assert layout(size, stride, 8) == expected


@pytest.mark.parametrize(
    ("kind", "inside", "nodes", "expected"),
    [
        ("all_gather", 8, 1, 7 / 8 * 800 / 40),
        ("reduce_scatter", 8, 1, 7 / 8 * 800 / 40),
        ("all_reduce", 8, 1, 2 * 7 / 8 * 800 / 40),
        ("all_gather", 1, 8, 7 / 8 * 800 / 5),  # a network card for itself
        (
            "all_gather",
            8,
            8,
            max(7 / 8 * 800 / (8 * 5), 63 / 64 * 800 / 45),
        ),  # eight cards together
        ("all_reduce", 1, 2, 2 * 1 / 2 * 800 / 5),
        ("all_to_all", 8, 1, 7 / 8 * 800 / 40),
        ("all_to_all", 8, 2, 8 / 16 * 800 / 5),
        ("broadcast", 8, 1, 800 / 40),
        ("broadcast", 8, 2, 800 / 40),
        ("broadcast", 1, 2, 800 / 5),
    ],
)
def test_the_time_of_a_collective(kind: str, inside: int, nodes: int, expected: float) -> None:
    assert seconds(kind, 800, inside, nodes, GPU) == pytest.approx(expected)


def test_more_nodes_never_make_a_collective_faster() -> None:
    """From two on: beside its link, a GPU of the second node brings its network card."""
    for kind in ("all_gather", "all_reduce", "all_to_all"):
        times = [seconds(kind, 1 << 30, 8, nodes, device("h100")) for nodes in (2, 4, 16, 64)]
        assert times == sorted(times)


def test_the_rate_of_products() -> None:
    assert [rate(dtype, GPU) for dtype in ("bfloat16", "float32", "float8_e4m3fn", "float64")] == [
        1000,
        500,
        2000,
        1000,
    ]


def test_compute_bound() -> None:
    """FSDP's traffic is hidden but for its first all-gather and its last reduce-scatter."""
    gather, scatter = (
        sent(purpose="parameters", count=4),
        sent("reduce_scatter", purpose="gradients", phase="backward", count=4),
    )
    work = {"": flops(forward=100_000, backward=200_000)}
    state = Peak(
        phase="later steps",
        bytes=0,
        reserved=0,
        expandable=0,
        kinds={"optimizer state": 400},
        module="",
        at_line=None,
    )
    found = bound(tried(gather, scatter, flops=work, peaks=[state], tokens=1000), GPU)
    assert found.compute == pytest.approx(300) and found.optimizer == pytest.approx(2 * 400 / 100)
    assert (
        found.exposed == pytest.approx(2 * 17.5)
        and found.link == pytest.approx(8 * 17.5)
        and found.waited == 0
    )
    assert found.step == pytest.approx(300 + 35 + 8)
    assert found.limited_by == "compute"
    assert found.mfu == pytest.approx(300 / 343) and found.tokens_per_second == pytest.approx(
        1000 / 343
    )


def test_no_product_is_faster_than_the_best_that_was_measured() -> None:
    gpu = replace(GPU, attainable={"bfloat16": 800.0})
    work = {
        "": flops(forward=100_000, backward=200_000),
        "head": flops(forward=10_000, dtype="float32"),
    }
    found = bound(tried(flops=work), gpu)
    assert (
        found.step == found.compute == pytest.approx(300 / 0.8 + 20)
    )  # no rate of float32 was measured
    assert found.mfu == pytest.approx(320 / 395)  # of the peaks, as everywhere


def test_without_torch_compile() -> None:
    """Operators without products read and write memory: more than the bound, which does not
    change.
    """
    work = {"": flops(forward=100_000, backward=200_000)}
    found = bound(tried(flops=work, moved=5000), GPU)
    assert found.step == bound(tried(flops=work), GPU).step == pytest.approx(300)
    assert found.moved == pytest.approx(50) and found.eager == pytest.approx(350)


def test_communication_bound() -> None:
    """Of traffic that takes longer than compute, nothing is counted twice."""
    gather = sent(purpose="parameters", count=4, group_size=64)
    found = bound(tried(gather, flops={"": flops(forward=10_000)}), GPU)
    one = max(7 / 8 * 800 / 40, 63 / 64 * 800 / 45)
    assert found.network == pytest.approx(4 * one) and found.link == 0
    assert found.step == pytest.approx(4 * one) and found.limited_by == "communication"
    assert found.tokens_per_second is None
    assert bound(
        tried(gather, flops={"": flops(forward=10_000)}), GPU, tokens=70
    ).tokens_per_second == pytest.approx(70 / 4 / one)


def test_what_compute_waits_for_is_added() -> None:
    reduced = sent("all_reduce", group="tp", count=3)
    found = bound(tried(reduced, flops={"": flops(forward=10_000)}), GPU)
    assert found.waited == pytest.approx(3 * 35) and found.step == pytest.approx(10 + 105)
    assert found.limited_by == "communication"


def test_link_and_network_work_at_the_same_time() -> None:
    inside, across = (
        sent(purpose="parameters", group="tp", count=10),
        sent(purpose="parameters", stride=8, count=2),
    )
    found = bound(tried(inside, across), GPU)
    assert (found.link, found.network) == (pytest.approx(175), pytest.approx(2 * 140))
    assert found.step == pytest.approx(280)


def test_recomputation_costs_time_and_is_no_use() -> None:
    """MFU counts no recomputation, and what a causal mask hides as if it were computed: where that
    is more than the peak gives, there is no bound.
    """
    plain = bound(tried(flops={"": flops(forward=1000, backward=2000)}), GPU)
    again = bound(tried(flops={"": flops(forward=1000, backward=3000, recompute=1000)}), GPU)
    masked = bound(tried(flops={"": flops(forward=1000, backward=2000, masked=600)}), GPU)
    assert (plain.mfu, again.mfu, masked.mfu) == (1.0, pytest.approx(3 / 4), None)
    assert "MFU at most 75% (by products" in fastest(again)
    assert "no bound on MFU below 100% (by products" in fastest(masked)
    assert (plain.step, again.step, masked.step) == (3, 4, pytest.approx(2.4))


def test_other_steps_and_groups_of_one_do_not_count() -> None:
    found = bound(
        tried(sent(step=1), sent(step=0), sent(group_size=1), flops={"": flops(forward=1000)}),
        GPU,
    )
    assert found.traffic == () and found.step == 1


def test_traffic_is_by_group_and_purpose() -> None:
    ones = [sent(purpose="parameters", bytes=size) for size in (800, 1600)] + [
        sent("all_reduce", group="tp", group_size=2)
    ]
    first, second = traffic(ones, GPU)
    assert (first.group, first.purpose, first.bytes, first.collectives, first.over) == (
        "dp",
        "parameters",
        2400,
        2,
        "link",
    )
    assert (second.group, second.purpose, second.size, second.nodes) == ("tp", "", 2, 1)
