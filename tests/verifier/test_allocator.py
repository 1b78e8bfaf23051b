"""The simulation of CUDA's caching allocator, step by step."""

import itertools
import random

import pytest

from verified_fsdp2.verifier.probe.capacity.allocator import Allocator

MIB = 1 << 20


def reserved(expandable: bool, *changes: tuple[int, float] | tuple[int, float, int]) -> list[float]:
    """MiB reserved after each (number, MiB, stream)."""
    allocator = Allocator(expandable)
    found = []
    for number, size, *stream in changes:
        allocator.resized(number, int(size * MIB), stream[0] if stream else 0)
        found.append(allocator.reserved / MIB)
    return found


@pytest.mark.parametrize(
    ("asked", "segment"),
    [(0.001, 2), (1, 2), (1.001, 20), (9.9, 20), (10, 10), (10.1, 12), (100, 100)],
)
def test_the_size_of_a_segment(asked: float, segment: float) -> None:
    assert reserved(False, (0, asked)) == [segment]


@pytest.mark.parametrize(("asked", "segment"), [(0.5, 2), (1.001, 20), (20, 20), (100.5, 120)])
def test_the_growth_of_an_expandable_segment(asked: float, segment: float) -> None:
    assert reserved(True, (0, asked)) == [segment]


def test_a_freed_block_is_used_again_and_split() -> None:
    assert reserved(False, (0, 100), (0, 0), (1, 60), (2, 40), (3, 40)) == [100, 100, 100, 100, 140]


def test_the_smallest_block_that_fits_is_taken() -> None:
    changes = [(0, 100), (1, 50), (0, 0), (1, 0), (2, 40), (3, 100)]
    assert reserved(False, *changes) == [100, 150, 150, 150, 150, 150]


def test_neighbours_merge_in_one_segment_alone() -> None:
    """40 and 60 MiB of one segment make 100; of two segments they do not."""
    one = [(0, 100), (0, 0), (1, 40), (2, 60), (1, 0), (2, 0), (3, 100)]
    two = [(1, 40), (2, 60), (1, 0), (2, 0), (3, 100)]
    assert reserved(False, *one)[-1] == 100
    assert reserved(False, *two)[-1] == 200
    assert reserved(True, *two)[-1] == 100


def test_what_is_left_of_a_large_block_is_split_from_1_mib_on() -> None:
    assert reserved(False, (0, 20), (0, 0), (1, 19), (2, 1.001)) == [20, 20, 20, 40]
    assert reserved(True, (0, 20), (0, 0), (1, 18), (2, 2))[-1] == 20


def test_a_hole_is_not_filled_by_what_is_larger() -> None:
    """Fragmentation: 1 GiB of tensors in 1.2 GiB, with expandable segments too."""
    changes = [(0, 200), (1, 800), (0, 0), (2, 400)]
    assert reserved(True, *changes)[-1] == 1400
    assert reserved(False, *changes)[-1] == 1400


def test_the_last_block_grows_by_what_is_missing() -> None:
    changes = [(0, 400), (1, 400), (1, 0), (2, 600)]
    assert reserved(True, *changes)[-1] == 1000
    assert reserved(False, *changes)[-1] == 1400


def test_streams_do_not_share() -> None:
    assert reserved(True, (0, 100, 1), (0, 0, 1), (1, 100, 2)) == [100, 100, 200]


def test_a_storage_that_is_resized_is_freed_first() -> None:
    assert reserved(True, (0, 100), (0, 0), (0, 100), (0, 50), (1, 50))[-1] == 100


@pytest.mark.parametrize("expandable", [False, True])
def test_blocks_never_overlap_and_all_is_counted(expandable: bool) -> None:
    draw = random.Random(0)
    allocator = Allocator(expandable)
    sizes: dict[int, int] = {}
    for _ in range(3000):
        number = draw.randrange(60)
        sizes[number] = (
            0 if sizes.get(number) else draw.choice((100, 5000, MIB + 1, 7 * MIB, 33 * MIB))
        )
        allocator.resized(number, sizes[number], number % 2)
        held = sorted((id(pool), start, size) for pool, start, size in allocator._held.values())
        for (pool, start, size), (other, after, _) in itertools.pairwise(held):
            assert pool != other or start + size <= after
        free = sum(size for pool in allocator._pools.values() for size, _ in pool._free)
        assert free + sum(size for _, _, size in held) == allocator.reserved
        assert allocator.reserved >= sum(sizes.values())
