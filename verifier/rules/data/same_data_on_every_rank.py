import math
from collections import Counter
from collections.abc import Iterator
from itertools import combinations

from ...analysis.wording import count
from ...evidence import Evidence
from ...finding import Finding, Hit
from ...source.events import ITERATE, Event, Flow
from ...source.looks import is_const, names_in, text, trains
from ...source.registry import detector
from ...source.values import Value, choices, reach
from ...trace import Run
from ...trace.events import Micro
from ..base import Rule

CHANCE = 1e-4  # equal batches in single steps are a fault where independent draws give them less often


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
    Fix: Give each rank its own slice of the global batch, e.g. `DistributedSampler(dataset)`, or a generator seeded
    with seed + rank for data.
    Source: the official pytorch/examples FSDP2 script (every rank seeded alike); mehta-lab/VisCy PR#408; the probe
    hashes each sample.
    """

    def applies(self, evidence: Evidence) -> str:
        if evidence.trained.world_size == 1:
            return "one rank has all the data"
        if len(evidence.trained.data_ranks) == 1:
            return "one data-parallel rank: all ranks hold parts of one model and share its samples"
        return ""

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        rows = [_trained_on(run, step) for step in range(1, run.steps() + 1)]
        seen = {row for step in range(1, run.steps() + 1) for own in run.rows(step) for row in own}
        if not seen:
            return self.unknown("the model was given no tensor whose rows could be told apart")
        shards = run.data_ranks
        pairs = list(combinations(shards, 2))
        same = {(a, b): [step for step, own in enumerate(rows, 1) if own[a] and own[a] == own[b]] for a, b in pairs}
        often, (a, b) = max((len(steps), pair) for pair, steps in same.items())
        if often:
            step = same[a, b][0]
            number = rows[step - 1][a].total()
            when = f"in each of {count(often, 'step')}" if often == len(rows) else f"in {often} of {len(rows)} steps"
            told = f"ranks {a} and {b} were given exactly the same {count(number, 'sample')} {when}"
            told += "" if often == len(rows) else f" (first in step {step})"
            if often < len(rows) and _by_chance(rows[step - 1][a], len(seen), len(pairs) * len(rows)) > CHANCE:
                return self.unknown(
                    f"{told}, which draws from {count(len(seen), 'sample')} give by chance: make more steps, or larger batches"
                )
            return self.failed(told, evidence.line_of(run, Micro))
        shared = sum((rows[0][a] & rows[0][b]).total() for a, b in pairs)
        return self.passed(
            f"{rows[0][shards[0]].total()} samples on each rank in step 1, {shared} of them shared with another rank"
        )


_MAPS = ("data.TensorDataset", "data.Subset", "data.random_split", "data.ConcatDataset")


def _loaded_in_training(flow: Flow, loader: Event) -> bool:
    """Whether a loader is iterated over around a backward."""
    for event in flow.ops(ITERATE):
        inside = any(part is loader.result for part in reach(event.args[0]))
        if inside and any(event.node in b.loops for b in flow.methods("backward")):
            return True
    return False


def _trained_on(run: Run, step: int) -> list[Counter[int]]:
    """For each rank its samples of a step, without those of a loss of exactly zero: a dummy batch keeps a rank in step with the others."""
    micros = run.micros(step)
    return [Counter(row for micro in own if micro.loss != 0.0 for row in micro.rows) for own in micros]


def _by_chance(batch: Counter[int], samples: int, trials: int) -> float:
    """How often, at most, one of `trials` pairs of batches is this one where each is drawn from so many samples."""
    size = batch.total()
    return min(1.0, math.exp(math.log(trials) + math.lgamma(size + 1) - size * math.log(samples)))


@detector("same-data-on-every-rank")
def same_data_on_every_rank(flow: Flow) -> Iterator[Hit]:
    if not flow.certain or not trains(flow) or not flow.roots or flow.rank_uses:
        return
    if names_in(flow, "split_dataset_by_node", "node_rank", "dp_rank", "data_parallel_rank", "get_worker_info"):
        return
    for event in flow.ops("data.DataLoader"):
        dataset = event.arg(0, "dataset")
        samples = [event.kwargs.get("sampler"), event.kwargs.get("batch_sampler"), event.kwargs.get("collate_fn")]
        if (
            dataset is None
            or event.open
            or len(event.args) > 3
            or any(s is not None and not is_const(s, None) for s in samples)
        ):
            continue
        seeded = _same_order(flow, event)
        if _is_map(flow, dataset) and seeded and _loaded_in_training(flow, event) and not flow.escapes(event.result):
            told = f"{text(event.node)} has no sampler, and nothing in the script gives a rank data of its own"
            yield flow.hit("same-data-on-every-rank", told, event)


def _same_order(flow: Flow, event: Event) -> bool:
    """Whether all ranks take the samples in one order."""
    shuffle = event.arg(2, "shuffle")
    if shuffle is None or is_const(shuffle, False):
        return True
    generator = event.kwargs.get("generator")
    if generator is not None:
        return any(part.name == "torch.Generator" for part in reach(generator))
    return any(e.args and not e.args[0].rank for e in flow.ops("torch.manual_seed") if e.index < event.index)


def _is_map(flow: Flow, dataset: Value) -> bool:
    for one in choices(dataset):
        own = one.kind == "object" and one.cls is not None and "Iterable" not in "".join(flow.external_bases(one.cls))
        if not own and not (one.kind == "made" and one.name in _MAPS):
            return False
    return True
