"""Faults of the law `samples`: samples seen twice, on two ranks, or in the same order again.

An epoch has 129 steps: 4,112 samples in global batches of 32, a short last one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cases import Case, Launch, case
from model import Batch, Points, ResumableSampler
from torch.utils.data import DataLoader

LAW = "samples"
SAME_WORLD = (Launch(until=300), Launch(until=600))
FEWER_RANKS = (Launch(until=300), Launch(world=4, until=600))


@case(LAW, "mosaicml/composer@a9b9791b: set_epoch reaches no sampler", begin=130)
class SetEpochMissing(Case):
    """Each epoch has the order of the first one.

    Proof: the first 64 samples of the second epoch are those of the first.
    """

    def begin_epoch(self) -> None:
        super().begin_epoch()
        self.sampler.set_epoch(0)


@case(LAW, "catalog of public reports: same data on every rank", every=20)
class SamplerOfRank0(Case):
    """Every rank reads the samples of rank 0.

    Proof: 28 samples twice in step 1.
    """

    def build_sampler(self) -> ResumableSampler:
        return ResumableSampler(self.data, self.world, 0, shuffle=True, seed=self.args.seed)


@case(LAW, "catalog of public reports: the sampler's rank ignores the mesh", mesh="hsdp", every=20)
class SamplerOfShardDim(Case):
    """The sampler counts the ranks of one replica only: both replicas read the same samples.

    Proof: 16 samples twice in step 1.
    """

    def build_sampler(self) -> ResumableSampler:
        half = self.world // 2
        return ResumableSampler(self.data, half, self.rank % half, seed=self.args.seed)


@case(LAW, "a sampler seeded with the rank's own seed", every=20)
class SamplerSeedOfRank(Case):
    """Each rank shuffles with a seed of its own, so their parts of the data overlap.

    Proof: 2 samples twice in step 1; 2 samples of step 2 seen earlier in the epoch.
    """

    def build_sampler(self) -> ResumableSampler:
        seed = self.args.seed + self.rank
        return ResumableSampler(self.data, self.world, self.rank, seed=seed)


@case(LAW, "a loader rebuilt without the sampler in a later epoch", begin=517)
class LoaderWithoutSamplerLater(Case):
    """From the fifth epoch on each rank shuffles the whole data set for itself.

    Proof: 1 samples twice in step 53; 2 samples of step 54 seen earlier in the epoch.
    """

    def begin_epoch(self) -> None:
        super().begin_epoch()
        if self.step + 1 >= self.begin and not isinstance(self.loader, _Plain):
            self.loader = _Plain(self.data, batch_size=self.per_rank, shuffle=True)


class _Plain(DataLoader[Batch]):
    """A loader that shuffles for itself."""


@case(LAW, "a worker's error answered with the last batch again", begin=700, ranks=(5,))
class LastBatchAgain(Case):
    """From step 700 on rank 5 trains on the same batch again and again.

    Proof: 1 samples twice in step 79; 4 samples of step 71 seen earlier in the epoch.
    """

    stuck: list[Batch] | None = None

    def train_step(self, window: list[Batch]) -> None:
        if self.here:
            self.stuck = self.stuck or window
            window = self.stuck
        super().train_step(window)


@case(LAW, "an iterator made anew after an evaluation within the epoch", begin=550)
class EpochBeginsAgain(Case):
    """An evaluation at step 550 makes a new iterator: the epoch starts from its first sample.

    Proof: 32 samples of step 55 seen earlier in the epoch.
    """

    def windows(self) -> Iterator[list[Batch]]:
        for window in super().windows():
            if self.now:
                break
            yield window
        else:
            return
        self.sampler.start = 0
        yield from super().windows()


@case(LAW, "a data set that counts its parts twice", mesh="ddp", every=100)
class DataSetWraps(Case):
    """The second half of the data set is the first half again.

    Proof: 1 samples twice in step 1; 1 samples of step 2 seen earlier in the epoch.
    """

    def build_data(self) -> Points:
        data, half = super().build_data(), self.args.samples // 2
        data.x[half:], data.y[half:] = data.x[:half].clone(), data.y[:half].clone()
        return data


@case(LAW, "windows cut with an overlap", begin=400, flags=("--accumulate", "2"))
class WindowsOverlap(Case):
    """From step 400 on each window begins with the last micro-batch of the one before.

    Proof: 1 samples twice in step 53; 16 samples of step 41 seen earlier in the epoch.
    """

    last: Batch | None = None

    def train_step(self, window: list[Batch]) -> None:
        before, self.last = self.last, window[-1]
        if self.late and before is not None:
            window = [before, *window[1:]]
        super().train_step(window)


@case(LAW, "the position within the epoch is not restored", begin=300, launches=SAME_WORLD)
class ResumeFromEpochStart(Case):
    """A resume goes on with the right epoch, from its first sample.

    Proof: 32 samples of step 31 seen earlier in the epoch; after the resume at step 30 batch
    is not as saved.
    """

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.batch = 0


@case(LAW, "a position that is counted per rank", begin=300, launches=FEWER_RANKS)
class PositionCountedPerRank(Case):
    """The samples to skip are counted in those of a rank of 8 ranks, and 4 ranks resume.

    Proof: 32 samples of step 31 seen earlier in the epoch.
    """

    def begin_epoch(self) -> None:
        super().begin_epoch()
        self.sampler.start = self.batch * self.args.global_batch // self.args.accumulate // 8


@case(LAW, "the number of the epoch is not restored", begin=300, launches=SAME_WORLD)
class EpochNumberLost(Case):
    """A resume counts epochs from 0: the rest of this epoch has the order of the first one.

    Proof: 32 samples of step 31 seen earlier in the epoch; after the resume at step 30 epoch
    is not as saved.
    """

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.epoch = 0


@case(
    LAW,
    "order drawn from the size of the world",
    begin=600,
    launches=(Launch(until=200), Launch(until=400), Launch(until=600), Launch(4, 800)),
)
class OrderOfAnotherWorld(Case):
    """The seed of the order has the number of ranks in it: 4 ranks go on in another order.

    Proof: 23 samples of step 61 seen earlier in the epoch.
    """

    def build_sampler(self) -> ResumableSampler:
        seed = self.args.seed + self.world
        return ResumableSampler(self.data, self.world, self.rank, seed=seed)


@case(LAW, "an uneven split that the script makes itself", begin=388, ranks=(7,))
class RankReadsItsNeighbours(Case):
    """From the fourth epoch on rank 7 reads the part of rank 6.

    Proof: 4 samples twice in step 40.
    """

    def begin_epoch(self) -> None:
        super().begin_epoch()
        if self.step + 1 >= self.begin and self.rank in self.facts.ranks:
            self.sampler.rank = 6
