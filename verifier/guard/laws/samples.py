"""Samples: none twice in an epoch, none on two ranks in a step, another order in each epoch, and
after a restart those that come next.

Each row of a training forward has a hash; its sum over a step is the same however rows are divided
between ranks. What is kept is bounded: of all rows those whose hash falls into a share that all
ranks choose alike (`_share`). A fault that meets few rows can be missed at a small share; one that
meets a part p of n rows is missed with probability (1 - p) ** (share * n).
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DistributedSampler, RandomSampler, WeightedRandomSampler

from ...probe.bit_sketch import mixed
from ...probe.compat.names import LOADER_NEXT
from ...probe.dispatcher import Call
from ...probe.events.data import length
from ...probe.tensor_fingerprint import row_sums
from ..context import Context
from ..epoch import FEW, Steps, digest
from ..journal import Breach, of_ranks
from ..measured import Measured
from . import Law, Posts

LIMIT = 1 << 16  # rows that all ranks together leave at a check
COMPARED = 3  # steps after a resume whose samples are compared, at least
COLUMNS = 4096  # elements of a row that are hashed, evenly spaced
NOT_CALLED = "no model of FSDP or DDP was called in training mode: samples and layers are not held"
_MASK = 2**64 - 1
_WITH_REPEATS = (WeightedRandomSampler,)


class Samples(Law):
    """The rows of each training forward."""

    name = "samples"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        # rows since the last check: (step, epoch, hashes)
        self._rows: list[tuple[int, int, torch.Tensor]] = []
        self._iterator: weakref.ref[Any] | None = None  # of the loader that gave the last batch
        self._epochs: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._made = 0  # iterators of loaders, in this process
        self._shuffles = False  # whether its sampler draws orders
        self._repeats = False  # whether the loader draws with replacement
        self._size = 0  # rows of the data set, 0 where it is not known
        self._begun: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._same_order: list[str] = []
        # of rank 0: steps whose samples are those of an earlier process, or others
        self._same: list[int] = []
        self._differ: list[int] = []

    def install(self) -> None:
        around = self.context.dispatcher.around
        around(LOADER_NEXT, after=self._given)
        around("torch.utils.data:DistributedSampler.__iter__", before=self._begins)

    def _begins(self, call: Call) -> None:
        sampler = call.args[0]
        assert isinstance(sampler, DistributedSampler)
        now = (int(sampler.epoch), self.context.step)
        before = self._begun.get(sampler)
        self._begun[sampler] = now
        # An epoch without a step in between was only looked at.
        if sampler.shuffle and before is not None and before[0] == now[0] and before[1] < now[1]:
            self._same_order.append(self.context.here())

    def _given(self, call: Call) -> None:
        iterator = call.args[0]
        if self._iterator is not None and self._iterator() is iterator:
            return
        self._iterator = weakref.ref(iterator)
        if iterator not in self._epochs:
            self._made += 1
            self._epochs[iterator] = self._made
        sampler = getattr(iterator, "_index_sampler", None)
        sampler = getattr(sampler, "sampler", sampler)
        data = getattr(iterator, "_dataset", None)
        drawn = isinstance(sampler, _WITH_REPEATS) or (
            isinstance(sampler, RandomSampler) and sampler.replacement
        )
        self._repeats = drawn
        self._shuffles = _shuffles(sampler) or _shuffles(getattr(iterator, "_index_sampler", None))
        self._size = length(data)

    def forward(self, module: nn.Module, given: list[torch.Tensor]) -> None:
        rows = row_sums([_thin(one) for one in given if one.dim()])
        if rows is not None and rows.numel():
            iterator = self._iterator() if self._iterator is not None else None
            epoch = self._epochs.get(iterator, 0) if iterator is not None else 0
            self._rows.append((self.context.step + 1, epoch, rows))

    def measure(self, measured: Measured) -> None:
        rows, self._rows = self._rows, []
        if rows:
            device = rows[-1][2].device
            measured.take_vector("rows", torch.cat([one.to(device) for _, _, one in rows]))
        # here: in the guard's thread the process group may be gone
        measured.values["data"] = self.context.scene.data_parallel()
        measured.values["called"] = next(self.context.scene.roots(), None) is not None
        measured.values["samples"] = [(step, epoch, len(one)) for step, epoch, one in rows]

    def local(self, measured: Measured) -> Iterator[Breach]:
        if not measured.values.get("called", True):
            # A model that trains in eval mode looks like one that is evaluated.
            self.context.journal.note(NOT_CALLED)
        same, self._same_order = self._same_order, []
        for place in same:
            yield self.breach(
                measured.step,
                "the sampler begins an epoch with the order of the one before: set_epoch was not"
                " called",
                ranks=[self.context.rank],
                place=place,
                edit="call sampler.set_epoch(epoch) before each epoch",
                command="fsdp2 explain set-epoch-missing",
                key="order",
            )

    def post(self, measured: Measured) -> dict[str, Any]:
        if measured.kind != "check" or "rows" not in measured.vectors:
            return {}
        rows = measured.vectors["rows"]
        kept = _share(rows, self.context.world)
        steps: dict[int, list[Any]] = {}
        at = 0
        for step, epoch, count in measured.values["samples"]:
            part, at = rows[at : at + count], at + count
            one = steps.setdefault(step, [step, epoch, 0, 0, []])
            one[2] = (one[2] + int(mixed(part).sum())) & _MASK
            one[3] += count
            one[4] += part[(part & kept) == 0].tolist()
        return {
            "steps": [*steps.values()],
            "share": kept,
            "size": self._size,
            "repeats": self._repeats,
            "shuffles": self._shuffles,
            "data": measured.values["data"],
        }

    def judge(self, measured: Measured, posts: Posts) -> Iterable[Breach]:
        posts = {rank: post for rank, post in posts.items() if post}
        if measured.kind != "check" or not posts:
            return
        steps: Steps = defaultdict(dict)
        for rank, post in posts.items():
            for one in post["steps"]:
                steps[one[0]][rank] = one
        some = next(iter(posts.values()))
        repeats = any(post["repeats"] for post in posts.values())
        complete = len(posts) == self.context.world
        if not repeats:
            yield from self._on_two_ranks(measured, posts, steps)
        digests = {step: digest(ranks) for step, ranks in sorted(steps.items())}
        if complete:
            measured.values.setdefault("curves", {})["samples"] = [
                [step, rows, f"{total:x}"] for step, (total, rows) in digests.items()
            ]
            yield from self._continued(measured, digests)
        if self.context.epoch.same_order and some["shuffles"]:
            yield self.breach(
                measured.step,
                "an epoch has the order of the one before, and its sampler draws orders",
                edit="call set_epoch before each epoch on the sampler that draws",
                command="fsdp2 explain set-epoch-missing",
                key="order",
            )
        for text in self.context.epoch.take(steps, some["share"] + 1, some["size"], repeats):
            yield self.breach(
                measured.step,
                text,
                edit="divide one order of the epoch between the ranks",
                command="fsdp2 explain samples-once-per-epoch",
                key="twice",
            )

    def _on_two_ranks(self, measured: Measured, posts: Posts, steps: Steps) -> Iterator[Breach]:
        """Ranks of one data-parallel mesh that trained on the same rows in the same step."""
        if any(not post["data"] for post in posts.values()):
            return
        shared: dict[tuple[int, ...], list[int]] = defaultdict(list)
        total = 0
        for step, ranks in steps.items():
            owners: dict[int, list[int]] = defaultdict(list)
            for rank, (*_, rows) in ranks.items():
                total += len(rows)
                for row in {*rows}:
                    owners[row].append(rank)
            for having in owners.values():
                if len(having) > 1 and _one_mesh(having, posts):
                    shared[tuple(having)].append(step)
        both = sum(len(at) for at in shared.values())
        within = sum(
            len(rows) - len({*rows})
            for ranks in steps.values()
            for _, _, _, _, rows in ranks.values()
        )
        # Where a rank draws the same row twice in a step, data are drawn with replacement.
        if both < max(4, FEW * total) or within > both / (2 * max(1, len(posts) - 1)):
            return
        those = sorted({rank for having in shared for rank in having})
        first = min(at[0] for at in shared.values())
        yield self.breach(
            measured.step,
            f"{of_ranks(those)} train on the same samples in one step, from"
            f" step {first} on ({both} of {total} rows of this check)",
            ranks=those,
            edit="divide the samples by the data-parallel rank and number of ranks",
            command="fsdp2 explain same-data-on-every-rank",
            key="two ranks",
        )

    def _continued(
        self, measured: Measured, digests: dict[int, tuple[int, int]]
    ) -> Iterator[Breach]:
        """The samples after a resume, against those of the run that went on after the save."""
        for step, (total, rows) in digests.items():
            known = self.context.epoch.earlier.pop(step, None)
            if known is not None and known[1] == rows:
                (self._same if known[0] == total else self._differ).append(step)
        compared = len(self._same) + len(self._differ)
        if compared >= COMPARED and len(self._differ) > len(self._same):
            first = min(self._differ)
            yield self.breach(
                measured.step,
                f"after the resume step {first} trains on other samples than the same step of the"
                f" run that was interrupted ({len(self._differ)} of {compared} steps differ)",
                since=first - 1,
                edit="save and restore the position in the epoch, and the seed of its order",
                command="fsdp2 explain resume-is-exact",
                key="position",
            )


def _shuffles(sampler: Any) -> bool:
    """Whether a sampler draws an order for each epoch: torch's own, or one that is given the
    epoch.
    """
    if isinstance(sampler, RandomSampler):
        return True
    return hasattr(sampler, "set_epoch") and bool(getattr(sampler, "shuffle", True))


def _thin(one: torch.Tensor) -> torch.Tensor:
    """At most COLUMNS elements of each row."""
    if one.layout != torch.strided or not one.numel():
        return one
    flat = one.reshape(one.shape[0], -1)
    return flat[:, :: max(1, flat.shape[1] // COLUMNS)] if flat.shape[1] > COLUMNS else one


def _share(rows: torch.Tensor, world: int) -> int:
    """The bits that are 0 in the hashes that are kept, so that all ranks leave at most LIMIT."""
    bits = max(0, (len(rows) * world // LIMIT).bit_length())
    return (1 << bits) - 1


def _one_mesh(ranks: list[int], posts: Posts) -> bool:
    """Whether ranks divide the data: two of them are in one data-parallel mesh."""
    meshes = [tuple(posts[rank]["data"]) for rank in ranks]
    return any(sum(rank in mesh for rank in ranks) > 1 for mesh in meshes)
