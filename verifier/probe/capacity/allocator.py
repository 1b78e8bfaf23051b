"""CUDA's caching allocator, simulated: what it takes from CUDA for a course of allocations.

As c10/cuda/CUDACachingAllocator.cpp of torch 2.13 does it where memory is enough: a block is a
multiple of 512 bytes and belongs to the stream on which it was allocated; the smallest free block
that is large enough is taken, and split; a freed block merges with its free neighbours. What no
block can hold is taken from CUDA: in segments of 2 MiB (requests up to 1 MiB), of 20 MiB (below 10
MiB), else of the size asked in multiples of 2 MiB; with `expandable_segments:True`, by growing the
one segment of the stream in steps of 2 or 20 MiB. Nothing is given back to CUDA, so what is
reserved only grows. Not simulated: what libraries take for themselves (NCCL, cuBLAS).
"""

from __future__ import annotations

from bisect import bisect_left, insort

_MIB = 1 << 20
_BLOCK = 512
_SMALL, _SMALL_SEGMENT = _MIB, 2 * _MIB
_MIDDLE, _LARGE_SEGMENT, _ROUNDED = 10 * _MIB, 20 * _MIB, 2 * _MIB


class Allocator:
    """The memory of one device. `reserved`: what was taken from CUDA so far."""

    def __init__(self, expandable: bool) -> None:
        self.expandable = expandable
        self.reserved = 0
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._held: dict[int, tuple[_Pool, int, int]] = {}  # by number: pool, address, size

    def resized(self, number: int, size: int, stream: int) -> None:
        """The storage of this number is freed, and allocated anew if it has a size."""
        if (held := self._held.pop(number, None)) is not None:
            pool, address, given = held
            pool.give(address, given)
        if size <= 0:
            return
        asked = -(-size // _BLOCK) * _BLOCK
        key = (stream, asked <= _SMALL)
        pool = self._pools.setdefault(key, _Pool(asked <= _SMALL, self.expandable))
        before = pool.reserved
        self._held[number] = (pool, *pool.take(asked))
        self.reserved += pool.reserved - before


class _Pool:
    """The blocks of one stream and kind. Addresses of segments that are apart do not touch."""

    def __init__(self, small: bool, expandable: bool) -> None:
        self.small, self.expandable = small, expandable
        self.reserved = 0
        self._end = 0  # of the last segment
        self._free: list[tuple[int, int]] = []  # (size, address), sorted
        self._sizes: dict[int, int] = {}  # of free blocks, by address
        self._starts: dict[int, int] = {}  # of free blocks, by their end

    def take(self, asked: int) -> tuple[int, int]:
        """Address and size of a block of at least this size."""
        address, size = self._fitting(asked) or self._grown(asked)
        rest = size - asked
        least = _BLOCK if self.small or self.expandable else _SMALL + 1
        if rest < least:
            return address, size
        self._put(address + asked, rest)
        return address, asked

    def give(self, address: int, size: int) -> None:
        """A block is free."""
        start = self._starts.get(address)
        if start is not None:
            size += self._remove(start)
            address = start
        if address + size in self._sizes:
            size += self._remove(address + size)
        self._put(address, size)

    def _fitting(self, asked: int) -> tuple[int, int] | None:
        position = bisect_left(self._free, (asked, -1))
        if (
            self.expandable
            and position + 1 < len(self._free)
            and sum(self._free[position]) == self._end
        ):
            position += 1  # the last block can grow: it counts as larger than all others
        if position == len(self._free):
            return None
        size, address = self._free[position]
        self._remove(address)
        return address, size

    def _grown(self, asked: int) -> tuple[int, int]:
        if not self.expandable:
            size = self._segment(asked)
            address = self._end + _BLOCK
            self._end = address + size
            self.reserved += size
            return address, size
        start = self._starts.get(self._end)
        there = 0 if start is None else self._remove(start)
        step = _SMALL_SEGMENT if self.small else _LARGE_SEGMENT
        more = -(-(asked - there) // step) * step
        address = self._end - there
        self._end += more
        self.reserved += more
        return address, there + more

    def _segment(self, asked: int) -> int:
        if self.small:
            return _SMALL_SEGMENT
        return _LARGE_SEGMENT if asked < _MIDDLE else -(-asked // _ROUNDED) * _ROUNDED

    def _put(self, address: int, size: int) -> None:
        insort(self._free, (size, address))
        self._sizes[address] = size
        self._starts[address + size] = address

    def _remove(self, address: int) -> int:
        size = self._sizes.pop(address)
        del self._starts[address + size]
        del self._free[bisect_left(self._free, (size, address))]
        return size
