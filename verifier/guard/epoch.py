"""The samples of the current epoch, as rank 0 knows them from the posts of all ranks."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .records import Record

RECORDED = 1 << 13  # rows of an epoch that a record of a save holds
SEEN = 1 << 17  # rows of an epoch that are kept
ORDER = 32  # steps of an epoch by which its order is compared
FEWEST = 4  # rows of a check
FEW = 0.05  # part of the rows of a check: fewer may be equal in the data, or pad an epoch's end
TAIL = 1 << 24  # bytes of an earlier journal that are read
_MASK = 2**64 - 1

Steps = dict[int, dict[int, list[Any]]]  # {step: {rank: [step, epoch, digest, rows, hashes]}}


class Epoch:
    """The rows of the current epoch, on rank 0."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self.epoch = -1
        self.share = 0  # rows of which these bits are 0 are in `seen`, if they were seen
        self.rows = 0.0  # of the epoch, all ranks together, also those outside of the share
        self.order: list[int] = []  # digests of the first steps of the epoch
        self.last_order: list[int] = []  # and of the epoch before
        self.earlier: dict[int, tuple[int, int]] = {}  # samples of steps of an earlier process
        self.same_order = 0  # epochs that had the order of the one before
        self._repeated = self._total = self._first = 0
        self._of_rank: dict[int, set[int]] = {}  # {rank: its rows of the epoch in this process}

    def take(self, steps: Steps, every: int, size: int, repeats: bool) -> Iterator[str]:
        """The steps of a check; `every`: one row of so many is in the share."""
        self._repeated = self._total = self._first = 0
        same_rank, expected = 0, 0.0
        for step in sorted(steps):
            ranks = steps[step]
            epoch = max(one[1] for one in ranks.values())
            if self.epoch < 0:  # the first of this process; after a resume an epoch goes on
                self.epoch = epoch
            if epoch != self.epoch:
                self.turn(epoch)
            if len(self.order) < ORDER:
                self.order.append(digest(ranks)[0])
            rows = {row for one in ranks.values() for row in one[4]}
            again = rows & self.seen
            # A loader that never ends goes through its data again and again.
            if size and self.rows + len(rows) * every > 0.9 * size and again:
                self.turn(epoch)
                again = set()
            if epoch and size and not repeats:
                self._first = self._first or (step if again else 0)
                self._repeated += len(again)
                self._total += sum(not row & self.share for row in rows)
            for rank, one in ranks.items():
                own, had = {*one[4]}, self._of_rank.setdefault(rank, set())
                same_rank += len(own & had)
                expected += len(own) * len(had) * every / size if size else 0.0
                if len(self.seen) < SEEN:
                    had |= own
            if len(self.seen) < SEEN:
                self.seen |= rows
            self.rows += len(rows) * every
        # Of draws with replacement a rank meets its own rows again as often as chance has it.
        drawn = expected >= FEWEST and abs(same_rank - expected) <= 3 * expected**0.5
        if self._repeated >= max(FEWEST, FEW * self._total) and not drawn:
            yield (
                f"{self._repeated} of {self._total} rows were trained on before in this epoch, from"
                f" step {self._first} on ({min(1.0, self.rows / size):.0%} of {size} samples were"
                " seen)"
            )

    def sample(self) -> tuple[list[int], int]:
        """Some of the rows of this epoch, and the bits that are 0 in them."""
        share = self.share
        some = [row for row in self.seen if not row & share]
        while len(some) > RECORDED:
            share = 2 * share + 1
            some = [row for row in some if not row & share]
        return some, share

    def go_on(self, record: Record, journal: Path) -> None:
        """The epoch of a save goes on in this process; the journal has what came next before."""
        self.earlier = _samples_after(journal, record)
        self.seen, self.share = {*record.seen}, record.share
        self.rows, self.epoch = float(record.epoch_rows), -1

    def turn(self, epoch: int) -> None:
        """Another epoch begins."""
        if len(self.order) > 2 and self.order == self.last_order:
            self.same_order += 1
        self.last_order, self.order = self.order, []
        self.epoch, self.seen, self.rows, self.share = epoch, set(), 0.0, 0
        self._of_rank = {}


def _samples_after(journal: Path, record: Record) -> dict[int, tuple[int, int]]:
    """{step: (digest, rows)} of the steps that the process of a save has made after it."""
    found: dict[int, tuple[int, int]] = {}
    after = False
    for line in _tail(journal):
        if line.get("kind") == "save" and line["path"] == record.path:
            after, found = line["step"] == record.step, {}
        elif line.get("kind") == "start":
            after = False  # of another run, or of one that went on from another save
        elif after:
            for step, rows, total in line.get("samples", ()):
                if step > record.step:
                    found[step] = (int(total, 16), rows)
    return found


def _tail(journal: Path) -> Iterator[dict[str, Any]]:
    """The last lines of a journal, without those that were cut."""
    try:
        with journal.open("rb") as file:
            file.seek(max(0, journal.stat().st_size - TAIL))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def digest(ranks: dict[int, list[Any]]) -> tuple[int, int]:
    """(sum of the hashes, rows) of a step; ranks with the same batch count once (tensor
    parallelism).
    """
    batches = {(one[2], one[3]) for one in ranks.values()}
    return sum(total for total, _ in batches) & _MASK, sum(rows for _, rows in batches)
