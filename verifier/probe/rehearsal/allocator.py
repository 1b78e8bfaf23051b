"""CUDA's caching allocator with its default settings: what it takes from the device for the tensors of a rehearsal.

Requests are rounded to 512 bytes. Those of at most 1 MiB share segments of 2 MiB; others below 10 MiB segments of 20 MiB; larger ones have
segments of their own, rounded to 2 MiB. A freed block serves later requests of its own stream, the smallest that suffices first, and is
split if enough remains; segments are kept. So `reserved` holds what fragmentation costs. Left out: that the allocator returns unused
segments before it reports out of memory, expandable segments, and what CUDA, NCCL and cuBLAS take for themselves.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

ROUND, SMALL, MEDIUM, SEGMENT, LARGE_SEGMENT = 512, 1 << 20, 10 << 20, 2 << 20, 20 << 20


@dataclass(eq=False, repr=False)
class Block:
    """A part of a segment, with its neighbours."""

    size: int
    pool: tuple[int, bool]  # stream, whether it is for small requests
    serial: int
    free: bool = False
    before: Block | None = None
    after: Block | None = None


@dataclass
class Allocator:
    """The blocks of one device."""

    reserved: int = 0
    _held: dict[int, Block] = field(default_factory=dict)  # by number of a storage
    _free: dict[tuple[int, bool], list[tuple[int, int, Block]]] = field(default_factory=dict)
    _serial: int = 0

    def resize(self, number: int, size: int, stream: int) -> None:
        """Give a storage a block of its new size; 0 frees it."""
        old = self._held.pop(number, None)
        if old is not None:
            self._release(old)
        if size:
            self._held[number] = self._request(-(-size // ROUND) * ROUND, stream)

    def _request(self, size: int, stream: int) -> Block:
        pool = (stream, size <= SMALL)
        free = self._free.setdefault(pool, [])
        at = bisect_left(free, (size,))
        if at < len(free):
            block = free.pop(at)[2]
        else:
            segment = SEGMENT if size <= SMALL else LARGE_SEGMENT if size < MEDIUM else -(-size // SEGMENT) * SEGMENT
            self.reserved += segment
            block = self._block(segment, pool)
        block.free = False
        rest = block.size - size
        if rest >= ROUND if pool[1] else rest > SMALL:
            other = self._block(rest, pool)
            other.before, other.after, block.after = block, block.after, other
            if other.after is not None:
                other.after.before = other
            block.size = size
            self._offer(other)
        return block

    def _release(self, block: Block) -> None:
        before, after = block.before, block.after
        if before is not None and before.free:
            self._withdraw(before)
            block.size, block.before = block.size + before.size, before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and after.free:
            self._withdraw(after)
            block.size, block.after = block.size + after.size, after.after
            if block.after is not None:
                block.after.before = block
        self._offer(block)

    def _block(self, size: int, pool: tuple[int, bool]) -> Block:
        self._serial += 1
        return Block(size, pool, self._serial)

    def _offer(self, block: Block) -> None:
        block.free = True
        insort(self._free.setdefault(block.pool, []), (block.size, block.serial, block))

    def _withdraw(self, block: Block) -> None:
        free = self._free[block.pool]
        del free[bisect_left(free, (block.size, block.serial))]
