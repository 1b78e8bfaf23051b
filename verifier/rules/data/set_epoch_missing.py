from ...analysis.applicability import absent, unfinished
from ...analysis.same_epochs import same_epochs
from ...source.events import ITERATE, Flow
from ...source.flow_queries import SAMPLER, is_const, names_in, text
from ...source.values import reach
from ...trace import Trace
from ...trace.events import Micro, Order, Sampler, SetEpoch
from ..base import Evidence, Finding, Hits, Rule, Uncovered, count

EPOCHS = "a second epoch"


class SetEpochMissing(Rule):
    """`set_epoch` is called on a shuffling DistributedSampler before each epoch.

    Why: its order is a function of seed and epoch, so that all ranks agree on it. Without
    `set_epoch` every epoch has the order of epoch 0: the batches never change, and a run that stops
    early in each epoch never sees the rest.
    Wrong:
        sampler = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True)
        for epoch in range(2):
            batches = list(sampler)
    Right:
        sampler = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            batches = list(sampler)
    Fix: Call `sampler.set_epoch(epoch)` before every epoch (also after a resume), on the sampler
    that the loader uses.
    Source: huggingface/nanoVLM PR#124; mehta-lab/VisCy PR#408; the documentation of
    `DistributedSampler`; mosaicml/composer@a9b9791b.
    """

    reads = frozenset({"survey"})

    def applies(self, evidence: Evidence) -> str:
        run = evidence.trained
        if same_epochs(evidence) is not None:
            return ""
        begun = max(len(_begun(trace)) for trace in run.traces)
        if begun == 1 and all(t.end is not None and t.end.how != "stopped" for t in run.traces):
            return absent(run, run.all(SetEpoch), "the script makes a single epoch")
        return absent(run, begun, "no DistributedSampler shuffles")

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        begun = [_begun(trace) for trace in run.traces]
        for trace in run.traces:
            if (again := _repeated(trace)) is not None:
                called = (
                    "never called" if trace.first(SetEpoch) is None else "not called in between"
                )
                order = f"(seed {again.seed}, {count(again.samples, 'sample')} on this rank)"
                text = (
                    f"the sampler repeats the order of epoch {again.epoch} {order}: set_epoch was"
                    f" {called}"
                )
                return self.failed(text, again.at_line)
        if (same := same_epochs(evidence)) is not None:
            text = (
                f"each epoch of {same.batches} batches trains on the same batches in the"
                f" same order, {same.times} epochs in the survey run: {_drawn(same.drawn)}"
            )
            return self.failed(text, same.drawn.at_line)
        if not any(begun):
            return self.unknown(unfinished(run))
        # A run that ends within its first epoch shows no second order: inconclusive.
        if max(map(len, begun)) == 1 and not run.all(SetEpoch):
            reason = "the run ended in the first epoch, without a call of set_epoch"
            return self.unknown(Uncovered(f"{reason}: give more --steps", EPOCHS))
        if evidence.hits.get(self.name):
            return self.unknown(Uncovered("the run ended in the first epoch", EPOCHS))
        epochs = len({r.epoch for records in begun for r in records})
        return self.passed(f"{count(epochs, 'epoch')} of a shuffling sampler, no order repeated")

    def detect(self, flow: Flow) -> Hits:
        if not flow.certain or names_in(flow, "set_epoch"):
            return
        for event in flow.ops(SAMPLER):
            shuffle = event.arg(3, "shuffle")
            if event.open or (shuffle is not None and not is_const(shuffle, True)):
                continue
            again = [
                turn for turn in flow.ops(ITERATE) if turn.loops and turn.node not in turn.loops
            ]
            inside = any(part is event.result for turn in again for part in reach(turn.args[0]))
            if inside and not flow.escapes(event.result):
                what = (
                    "is iterated over each epoch without set_epoch: every epoch has the same order"
                )
                yield f"{text(event.node)} {what}", event


def _drawn(order: Order | Sampler) -> str:
    """What draws the same order in each epoch."""
    if isinstance(order, Sampler):
        return f"the sampler begins epoch {order.epoch} (seed {order.seed}) each time"
    return f"the order of {order.samples} is drawn anew each time, and comes out the same"


def _begun(trace: Trace) -> list[Sampler]:
    """The epochs that a rank's shuffling samplers have begun."""
    return [record for record in trace.of(Sampler) if record.shuffle]


def _repeated(trace: Trace) -> Sampler | None:
    """The sampler record that begins an order on which this rank has trained before.

    An order of which only a first batch is read (for its shape), or on which nothing is trained,
    does not count.
    """
    # (dataset, seed, epoch): micro-batches since its order was begun
    begun: dict[tuple[int, int, int], int] = {}
    last: tuple[int, int, int] | None = None
    waiting: Sampler | None = None
    for record in trace.records:
        if isinstance(record, Sampler) and record.shuffle:
            last = (record.dataset, record.seed, record.epoch)
            # An order of which at most one batch was trained on was read for its shape, not as an
            # epoch (scripts that read a first batch for its shape).
            waiting = record if begun.get(last, 0) > 1 else None
            begun[last] = 0
        elif isinstance(record, Micro) and last is not None:
            begun[last] += 1
            if waiting is not None:
                return waiting
    return None
