from collections.abc import Iterator

from ...analysis.presence import absent, unfinished
from ...analysis.wording import count
from ...evidence import Evidence
from ...finding import Finding, Hit
from ...source.events import ITERATE, Flow
from ...source.looks import is_const, names_in, text
from ...source.looks_data import SAMPLER
from ...source.registry import detector
from ...source.values import reach
from ...trace import Run, Trace
from ...trace.events import Micro, Sampler, SetEpoch
from ..base import Rule


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
    Fix: Call `sampler.set_epoch(epoch)` at the start of every epoch (and after a resume), on the sampler that the
    loader really uses.
    Source: huggingface/nanoVLM PR#124; mehta-lab/VisCy PR#408; the documentation of `DistributedSampler`.
    """

    def applies(self, evidence: Evidence) -> str:
        run = evidence.trained
        begun = max(len(_begun(trace)) for trace in run.traces)
        alone = begun == 1 and all(t.end is not None and t.end.how != "stopped" for t in run.traces)
        if alone:
            return absent(run, _told_epoch(run), "the script makes a single epoch")
        return absent(run, begun, "no DistributedSampler shuffles")

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        begun = [_begun(trace) for trace in run.traces]
        if not any(begun):
            return self.unknown(unfinished(run))
        for trace in run.traces:
            if (again := _repeated(trace)) is not None:
                told = "never called" if trace.first(SetEpoch) is None else "not called in between"
                return self.failed(
                    f"the sampler begins epoch {again.epoch} a second time, in the same order (seed {again.seed}, "
                    f"{count(again.samples, 'sample')} on this rank): set_epoch was {told}",
                    again.at_line,
                )
        if max(map(len, begun)) == 1 and not _told_epoch(run):
            return self.unknown(
                "the run ended within the first epoch, for which set_epoch was not called: give more --steps"
            )
        if evidence.hits.get(self.name):
            return self.unknown("the run ended within the first epoch")
        epochs = len({r.epoch for records in begun for r in records})
        return self.passed(f"{count(epochs, 'epoch')} of a shuffling sampler begun, none of them twice")


def _begun(trace: Trace) -> list[Sampler]:
    """The orders that a rank's shuffling samplers have begun."""
    return [record for record in trace.of(Sampler) if record.shuffle]


def _told_epoch(run: Run) -> bool:
    return any(trace.first(SetEpoch) is not None for trace in run.traces)


def _repeated(trace: Trace) -> Sampler | None:
    """The sampler record that begins an order which micro-batches of this rank have been taken from before.

    An order that is only looked into (a first batch for its shape) or gone through without training is none.
    """
    begun: dict[tuple[int, int, int], int] = {}  # (dataset, seed, epoch): micro-batches since its order was begun
    last: tuple[int, int, int] | None = None
    waiting: Sampler | None = None
    for record in trace.records:
        if isinstance(record, Sampler) and record.shuffle:
            last = (record.dataset, record.seed, record.epoch)
            waiting = record if begun.get(last, 0) > 1 else None
            begun[last] = 0
        elif isinstance(record, Micro) and last is not None:
            begun[last] += 1
            if waiting is not None:
                return waiting
    return None


@detector("set-epoch-missing")
def set_epoch_missing(flow: Flow) -> Iterator[Hit]:
    if not flow.certain or names_in(flow, "set_epoch"):
        return
    for event in flow.ops(SAMPLER):
        shuffle = event.arg(3, "shuffle")
        if event.open or (shuffle is not None and not is_const(shuffle, True)):
            continue
        for turn in flow.ops(ITERATE):
            inside = any(part is event.result for part in reach(turn.args[0]))
            if inside and turn.loops and turn.node not in turn.loops and not flow.escapes(event.result):
                told = f"{text(event.node)} is iterated over once an epoch and never told the epoch: each has the same order"
                yield flow.hit("set-epoch-missing", told, event)
                break
