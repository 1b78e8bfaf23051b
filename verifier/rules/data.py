"""Rules on which rank sees which samples."""

from __future__ import annotations

from itertools import combinations

from ..evidence import Evidence
from ..finding import Finding
from ..trace import Record, Trace
from .base import Rule, count


class SameDataOnEveryRank(Rule):
    """Data-parallel ranks train on different samples.

    Why: without a sampler that knows the rank, or with one seeded generator everywhere, every rank computes the same
    gradient. The loss falls as it should, N ranks do the work of one, and the global batch is N times smaller than it
    says.
    Wrong:
        torch.manual_seed(0)
        tokens = torch.randint(0, vocabulary, (batch_size, sequence_length))  # the same on every rank
        loss_of(model, tokens).backward()
    Right:
        start = step * batch_size * dist.get_world_size() + dist.get_rank() * batch_size
        tokens = dataset[start : start + batch_size]  # each rank its own slice of the global batch
        loss_of(model, tokens).backward()
    Mend: Give each rank its own slice of the global batch, e.g. `DistributedSampler(dataset)`, or a generator seeded
    with seed + rank for data.
    Source: the official pytorch/examples FSDP2 script (every rank seeded alike); mehta-lab/VisCy PR#408; the probe
    hashes each sample.
    Torch: run on 2.13.0.
    """

    name = "same-data-on-every-rank"
    family = "data"

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        if run is None or run.steps() == 0:
            return self.unknown("no optimizer step was seen")
        if run.world_size == 1:
            return self.unknown("one rank has all the data")
        if len(run.data_ranks) == 1:
            return self.passed("one data-parallel rank: all ranks hold parts of one model and share its samples")
        steps = range(1, run.steps() + 1)
        rows = [run.rows(step) for step in steps]
        if not any(sum(per_rank, start=rows[0][0] - rows[0][0]) for per_rank in rows):
            return self.unknown("the model was given no tensor whose rows could be told apart")
        shards = run.data_ranks
        pairs = [
            (a, b)
            for a, b in combinations(shards, 2)
            if all(per_rank[a] and per_rank[a] == per_rank[b] for per_rank in rows)
        ]
        if pairs:
            a, b = pairs[0]
            return self.failed(
                f"ranks {a} and {b} were given exactly the same {count(rows[0][a].total(), 'sample')} "
                f"in each of {count(len(rows), 'step')}",
                evidence.line_of(run, "micro"),
            )
        shared = sum((rows[0][a] & rows[0][b]).total() for a, b in combinations(shards, 2))
        return self.passed(
            f"{rows[0][shards[0]].total()} samples on each rank in step 1, {shared} of them shared with another rank"
        )


class SetEpochMissing(Rule):
    """A shuffling DistributedSampler is told the epoch before each of them.

    Why: its order is a function of seed and epoch, so that all ranks agree on it. Without `set_epoch` the epoch stays
    0 and every epoch goes through the same order: micro-batches hold the same samples together for ever, and a run
    that stops early in each epoch never sees the rest.
    Wrong:
        sampler = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True)
        for epoch in range(2):
            for index in sampler:
                pass
    Right:
        sampler = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for index in sampler:
                pass
    Mend: Call `sampler.set_epoch(epoch)` at the start of every epoch (and after a resume), on the sampler that the
    loader really uses.
    Source: huggingface/nanoVLM PR#124; mehta-lab/VisCy PR#408; the documentation of `DistributedSampler`.
    Torch: run on 2.13.0.
    """

    name = "set-epoch-missing"
    family = "data"

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        if run is None or run.steps() == 0:
            return self.unknown("no optimizer step was seen")
        begun = [r for t in run.traces for r in t.of("sampler") if r["shuffle"]]
        if not begun:
            return self.passed("no DistributedSampler shuffles")
        for trace in run.traces:
            if (again := _repeated(trace)) is not None:
                told = "never called" if trace.first("set_epoch") is None else "not called in between"
                return self.failed(
                    f"the sampler begins epoch {again['epoch']} a second time, in the same order (seed {again['seed']}, "
                    f"{count(again['samples'], 'sample')} on this rank): set_epoch was {told}",
                    again["at_line"],
                )
        if evidence.hits.get(self.name):
            return self.unknown("the run ended within the first epoch")
        epochs = len({r["epoch"] for r in begun})
        return self.passed(f"{count(epochs, 'epoch')} of a shuffling sampler begun, none of them twice")


def _repeated(trace: Trace) -> Record | None:
    """The sampler record that begins an order which micro-batches of this rank have been taken from before.

    An order that is only looked into (a first batch for its shape) or gone through without training is none.
    """
    begun: dict[tuple[int, int, int], int] = {}  # (dataset, seed, epoch): micro-batches since its order was begun
    last: tuple[int, int, int] | None = None
    waiting: Record | None = None
    for record in trace.records:
        if record["kind"] == "sampler" and record["shuffle"]:
            last = (record["dataset"], record["seed"], record["epoch"])
            waiting = record if begun.get(last, 0) > 1 else None
            begun[last] = 0
        elif record["kind"] == "micro" and last is not None:
            begun[last] += 1
            if waiting is not None:
                return waiting
    return None


RULES = (SameDataOnEveryRank, SetEpochMissing)
