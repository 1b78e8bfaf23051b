import math
from collections import Counter
from dataclasses import dataclass
from itertools import combinations

from ...analysis.probability import log_equal_batches, log_shared
from ...source.events import ITERATE, Event, Flow
from ...source.flow_queries import is_const, names_in, text, trains
from ...source.values import Value, choices, reach
from ...tolerances import EQUAL_BATCHES
from ...trace.events import Micro
from ..base import Evidence, Finding, Hits, Rule, Run, count


class SameDataOnEveryRank(Rule):
    """Data-parallel ranks train on different samples.

    Why: without a sampler that uses the rank, or with generators seeded alike, every rank computes
    the same gradient. The loss falls as usual, N ranks do the work of one, and the global batch is
    N times smaller than configured.
    Wrong:
        torch.manual_seed(0)
        # the same on every rank
        tokens = torch.randint(0, vocabulary, (batch_size, sequence_length))
    Right:
        start = step * batch_size * dist.get_world_size() + dist.get_rank() * batch_size
        tokens = dataset[start : start + batch_size]  # each rank its own slice of the global batch
    Fix: Give each rank its own slice of the global batch (`DistributedSampler`), or seed its data
    with seed + rank.
    Source: the official pytorch/examples FSDP2 script (all ranks seeded alike); mehta-lab/VisCy
    PR#408.
    """

    reads = frozenset({"single"})

    def applies(self, evidence: Evidence) -> str:
        if evidence.trained.world_size == 1:
            return "not applicable with one rank"
        # Tensor- and context-parallel ranks share one sample on purpose; they count once
        # (zoo/tp_fsdp.py).
        alone = len(evidence.trained.sample_ranks) == 1
        return (
            "one data-parallel rank: all ranks hold parts of one model and share its samples"
            if alone
            else ""
        )

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        rows = [_trained_on(run, step) for step in range(1, run.steps() + 1)]
        seen = {row for step in range(1, run.steps() + 1) for own in run.rows(step) for row in own}
        # Without a backward the samples of a step are not recorded: not applicable (exam evolution
        # strategies (n_13, u_13, fb_10)).
        if not seen and not run.all(Micro):
            return self.not_applicable(
                "no step has a backward: samples of the forwards behind it are not recorded"
            )
        if not seen:
            return self.unknown("the model was given no tensor with distinguishable rows")
        alike = _most_alike(evidence, rows)
        if alike is None and (overlap := _overlap(evidence, rows)):
            return self.failed(overlap, run.data_line())
        if alike is None:
            shared = sum(
                (rows[0][a] & rows[0][b]).total() for a, b in combinations(run.sample_ranks, 2)
            )
            samples = f"{rows[0][run.sample_ranks[0]].total()} samples on each rank in step 1"
            return self.passed(f"{samples}, {shared} of them shared with another rank")
        ranks, same = f"ranks {alike.a} and {alike.b}", count(alike.batch.total(), "sample")
        # Ranks given the same whole graph that compute losses of other nodes train on other targets
        # (exam round 2 f_07_gnn_select twin).
        if _other_targets(evidence.full_precision or run, alike):
            return self.passed(
                f"{ranks} are given the same {same} and compute other losses: other targets"
            )
        often = len(alike.steps)
        if often == len(rows):
            text = f"{ranks} were given the same {same} in each of {count(often, 'step')}"
            return self.failed(text, run.data_line())
        when = f"{often} of {len(rows)} steps, first in step {alike.steps[0]}"
        text = f"{ranks} were given the same {same} in {when}"
        trials = math.comb(len(run.sample_ranks), 2) * len(rows)
        if _by_chance(alike.batch, len(seen), trials) > EQUAL_BATCHES:
            return self.unknown(
                f"{text}; random draws from {count(len(seen), 'sample')} may give this: make more"
                " steps, or larger batches"
            )
        return self.failed(text, run.data_line())

    def detect(self, flow: Flow) -> Hits:
        if (
            not flow.certain
            or not trains(flow)
            or not flow.roots
            # A script that uses the rank anywhere may split its data in a way that is not followed
            # (linted right scripts).
            or flow.rank_uses
            or names_in(flow, *_BY_RANK)
        ):
            return
        loops = {loop for backward in flow.methods("backward") for loop in backward.loops}
        loaded = [part for e in flow.ops(ITERATE) if e.node in loops for part in reach(e.args[0])]
        for event in flow.ops("data.DataLoader"):
            dataset = event.arg(0, "dataset")
            given = [event.kwargs.get(name) for name in ("sampler", "batch_sampler", "collate_fn")]
            own_order = (
                event.open
                or len(event.args) > 3
                or any(v is not None and not is_const(v, None) for v in given)
            )
            if (
                dataset is None
                or own_order
                or not _same_order(flow, event)
                or flow.escapes(event.result)
            ):
                continue
            if event.result in loaded and all(_is_map(flow, one) for one in choices(dataset)):
                yield (
                    (
                        f"{text(event.node)} has no sampler, and nothing in the script splits the"
                        " data by rank"
                    ),
                    event,
                )


# Names of libraries' ways to split data by rank that the flow does not follow.
_BY_RANK = (
    "split_dataset_by_node",
    "node_rank",
    "dp_rank",
    "data_parallel_rank",
    "get_worker_info",
)
_MAPS = ("data.TensorDataset", "data.Subset", "data.random_split", "data.ConcatDataset")


@dataclass(frozen=True)
class _Alike:
    """Two ranks and the steps in which they train on the same samples; `batch`: those of the first
    such step.
    """

    a: int
    b: int
    steps: list[int]
    batch: Counter[int]


def _most_alike(evidence: Evidence, rows: list[list[Counter[int]]]) -> _Alike | None:
    """The ranks that have the same samples in most steps; None if no two have in any."""
    right = _batches_of_one_process(evidence)
    # Steps whose samples over all ranks are those of one process are right: what two ranks share is
    # twice in the data (exam round 6 w_18_sam_swa).
    steps = [(step, own) for step, own in enumerate(rows, 1) if step not in right]
    same = {
        (a, b): [step for step, own in steps if own[a] and own[a] == own[b]]
        for a, b in combinations(evidence.trained.sample_ranks, 2)
    }
    a, b = max(same, key=lambda pair: (len(same[pair]), pair))
    equal = same[a, b]
    return _Alike(a, b, equal, rows[equal[0] - 1][a]) if equal else None


def _overlap(evidence: Evidence, rows: list[list[Counter[int]]]) -> str:
    """That two ranks share most of what is new to them, in words; "" if no two do.

    Slices that begin at a wrong offset overlap without being equal (lingua: the data rank of a mesh
    was worked out with the wrong size). Rows that come again in each step, such as prompts of
    classes, are no samples.
    """
    right = _batches_of_one_process(evidence)
    steps = [own for step, own in enumerate(rows, 1) if step not in right]
    samples = len({row for own in steps for batch in own for row in batch})
    for a, b in combinations(evidence.trained.sample_ranks, 2):
        pairs = list(zip(_new(steps, a), _new(steps, b), strict=True))
        shared = [len(x & y) for x, y in pairs]
        most = [k for k, (x, y) in enumerate(pairs) if 2 * shared[k] > max(len(x), len(y), 1)]
        if not pairs or 2 * len(most) <= len(pairs):
            continue
        chance = sum(log_shared(shared[k], len(pairs[k][0]), samples) for k in most)
        trials = math.comb(len(evidence.trained.sample_ranks), 2) * 2 ** len(pairs)
        if chance + math.log(trials) < math.log(EQUAL_BATCHES):
            first = most[0]
            what = f"{shared[first]} of their {count(len(pairs[first][0]), 'sample')}"
            often = f"in {len(most)} of {len(pairs)} steps they share most of them"
            return f"ranks {a} and {b} share {what} of step {first + 1}; {often}"
    return ""


def _new(steps: list[list[Counter[int]]], rank: int) -> list[set[int]]:
    """What a rank trains on in each step and has not before."""
    seen: set[int] = set()
    found = []
    for own in steps:
        found.append(set(own[rank]) - seen)
        seen |= set(own[rank])
    return found


def _trained_on(run: Run, step: int) -> list[Counter[int]]:
    """For each rank its samples of a step, without those of a loss of exactly zero (dummy
    batches).
    """
    micros = run.micros(step)
    return [
        # A batch whose loss is exactly zero (a dummy for ranks that ran out) trains nothing, and
        # may be equal everywhere (zoo/zero_loss.py).
        Counter(row for micro in own if micro.loss != 0.0 for row in micro.rows)
        for own in micros
    ]


def _batches_of_one_process(evidence: Evidence) -> set[int]:
    """The steps whose samples, over all ranks, are those that one process takes: what two ranks
    share is twice in the data.
    """
    run, single = evidence.trained, evidence.single
    shared = range(1, min(run.steps(), single.steps()) + 1) if single is not None else ()
    return {
        step
        for step in shared
        if single is not None and run.global_batch(step) == single.global_batch(step)
    }


def _other_targets(run: Run, alike: _Alike) -> bool:
    """Whether the two ranks compute other losses from equal samples and equal states of the
    generators, as parts of a graph do.
    """
    made = [run.micros(step) for step in alike.steps if step <= run.steps()]
    pairs = [
        pair for micros in made for pair in zip(micros[alike.a], micros[alike.b], strict=False)
    ]
    # Other losses of equal samples mean other targets only where dropout could not make them
    # differ: the generators are in the same state.
    losses = [(x.loss, y.loss) for x, y in pairs if x.random == y.random]
    apart = [abs(x - y) for x, y in losses if x is not None and y is not None]
    return bool(pairs) and len(apart) == len(pairs) and all(value > 0.0 for value in apart)


def _by_chance(batch: Counter[int], samples: int, trials: int) -> float:
    """The largest probability that one of `trials` pairs of batches is this one, each drawn from so
    many samples.
    """
    return min(1.0, math.exp(math.log(trials) + log_equal_batches(batch.total(), samples)))


def _same_order(flow: Flow, event: Event) -> bool:
    """Whether all ranks take the samples in one order."""
    shuffle = event.arg(2, "shuffle")
    if shuffle is None or is_const(shuffle, False):
        return True
    generator = event.kwargs.get("generator")
    if generator is not None:
        return any(part.name == "torch.Generator" for part in reach(generator))
    return any(
        e.args and not e.args[0].rank
        for e in flow.ops("torch.manual_seed")
        if e.index < event.index
    )


def _is_map(flow: Flow, one: Value) -> bool:
    """Whether a dataset is indexed, and so is the same on all ranks."""
    own = (
        one.kind == "object"
        and one.cls is not None
        and "Iterable" not in "".join(flow.external_bases(one.cls))
    )
    return own or (one.kind == "made" and one.name in _MAPS)
