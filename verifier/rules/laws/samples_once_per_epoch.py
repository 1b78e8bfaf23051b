import ast
import math
from collections import Counter
from collections.abc import Callable, Iterator

from ...analysis.comparison import parted
from ...analysis.later_epochs import later_epoch, survey_epochs
from ...analysis.probability import log_equal_batches
from ...analysis.syntax import walk
from ...evidence import Sources
from ...source.values import RANK_NAMES
from ...tolerances import BATCHES_AGAIN, LEAST_STEPS, MANY, REPEATED_BATCHES
from ...trace import Trace
from ...trace.events import Batch, Micro, Order, Place, Sampler
from ..base import Evidence, Finding, Rule, Run, Uncovered, count


class SamplesOncePerEpoch(Rule):
    """Within an epoch each sample is trained on once, by one rank.

    Why: ranks that draw different orders and each take their part of their own, or whose parts
    overlap in a later step, train on some samples several times and on others never. The loss falls
    as usual.
    Wrong:
        generator = torch.Generator().manual_seed(seed + rank)  # another order on every rank
        order = torch.randperm(len(dataset), generator=generator)
        own = order[rank::world]
    Right:
        generator = torch.Generator().manual_seed(seed + epoch)  # one order that the ranks share
        order = torch.randperm(len(dataset), generator=generator)
        own = order[rank::world]
    Fix: Draw the order of an epoch from a seed that all ranks share, and advance by the global
    batch in each step.
    Source: law L9: the probe hashes the samples of each step, and the orders that each rank draws;
    later epochs are those of the survey run, up to 64 samples a micro-batch and 4000 of these.
    Random draws with replacement, several epochs, padding, what is left over, and batches that one
    process has in the same steps are no breach.
    """

    reads = frozenset({"single", "survey"})

    def applies(self, evidence: Evidence) -> str:
        run = evidence.trained
        if len(run.sample_ranks) < 2:
            return "not applicable with one data-parallel rank"
        if _later_epochs(self, evidence) is not None or _parts(self, evidence) is not None:
            return ""
        if not any(run.global_batch(step) for step in range(1, run.steps() + 1)):
            reason = "the model was given no tensor whose rows could be distinguished"
            return Uncovered(reason, "whether samples repeat")
        few = Uncovered(f"fewer than {LEAST_STEPS} steps were made", "whether samples repeat")
        return "" if run.steps() >= LEAST_STEPS else few

    def judge(self, evidence: Evidence) -> Finding:
        found = (case(self, evidence) for case in CASES)
        return next(filter(None, found), None) or self._nothing_wrong(evidence)

    def _nothing_wrong(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        steps = [run.global_batch(step) for step in range(1, run.steps() + 1)]
        samples = count(len(set().union(*steps)), "sample")
        epochs = max(map(len, survey_epochs(evidence)), default=0)
        later = f"; {epochs} epochs of the whole script were compared" if epochs > 1 else ""
        return self.passed(
            f"{samples} in {count(len(steps), 'step')}: no rank repeats the batches of another, or"
            f" takes part of an order of its own{later}"
        )


def _parts(rule: Rule, evidence: Evidence) -> Finding | None:
    """The ranks take their parts of different orders of a DistributedSampler.

    Orders of another number of parts or samples are those of other data.
    """
    for run in filter(None, (evidence.train, evidence.survey)):
        begun = [_begun(trace) for trace in run.traces]
        for line in begun[0] if begun else ():
            for orders in zip(*(own.get(line, []) for own in begun), strict=False):
                differ = {(one.seed, one.epoch) for one in orders}
                if len({(one.parts, one.samples) for one in orders}) == 1 and len(differ) > 1:
                    seeds, epochs = (sorted(set(column)) for column in zip(*differ, strict=True))
                    which = f"epochs {epochs}" if len(epochs) > 1 else f"seeds {seeds}"
                    what = f"the ranks take their parts of different orders: those of the {which}"
                    return rule.failed(what, orders[0].at_line)
    return None


def _divided(rule: Rule, evidence: Evidence) -> Finding | None:
    """A batch sampler gives each rank its part of an order that is another one on each rank.

    A rank that walks the whole order (one part) may have its own.
    """
    run = evidence.trained
    drawn = [_by_line(trace) for trace in run.traces if trace.rank in run.sample_ranks]
    last = max((micro.seq for trace in run.traces for micro in trace.of(Micro)), default=-1)
    for key, orders in drawn[0].items():
        firsts = [own[key][0] for own in drawn if key in own and own[key][0].seq < last]
        apart = len({one.digest for one in firsts}) > 1
        if len(firsts) == len(drawn) and apart and min(one.parts for one in firsts) > 1:
            what = (
                f"each rank takes one of {orders[0].parts} parts of an order of its own of"
                f" {orders[0].samples} samples"
            )
            return rule.failed(what, orders[0].at_line)
    return None


def _orders(rule: Rule, evidence: Evidence) -> Finding | None:
    """Ranks draw different orders, of which each takes its part."""
    run = evidence.trained
    traces = [trace for trace in run.traces if trace.rank in run.sample_ranks]
    largest = max(run.global_batch(step).total() for step in range(1, run.steps() + 1))
    for place, samples, used in _own_orders(traces):
        for ranks in used:
            rows = [Counter(row for own in rank.values() for row in own) for rank, _ in ranks]
            distinct = len(set().union(*rows))
            trained = sum(len(own) for own in rows)
            # Where reading augments them, that nothing is trained on twice shows nothing.
            changed = trained == distinct and _are_changed(samples, run, evidence.single)
            equal = any(own.total() > len(own) for own in rows)  # in the data, or drawn twice
            if not changed and (equal or trained == distinct):
                continue
            # Only an order that was used up, of two batches or more, shows that the parts of the
            # ranks add up to one epoch; else the code does.
            used_up = all(ended for _, ended in ranks) and 2 * largest <= samples and not changed
            whole = used_up and abs(trained - samples) < largest
            if whole or _taken_by_rank(evidence.sources, place):
                what = f"each rank draws its own order of {samples} samples and takes a part of it"
                again = (
                    f": {trained - distinct} of {trained} samples were trained on by several ranks"
                )
                return rule.failed(what + (" by its rank" if changed else again), place)
    return None


def _later(rule: Rule, evidence: Evidence) -> Finding | None:
    """A rank trains on the batches of another some steps later, while samples are left that no
    rank has seen.
    """
    run, single = evidence.trained, evidence.single
    # Windows that overlap are the script's own order, where one process has the same samples in
    # each step (exam round 12, nd_01_moe_balance).
    if single is not None and single.steps() >= run.steps() and parted(run, single) is None:
        return None
    again, smallest, known = _had_before(run)
    if not again:
        return None
    (rank, other, later), often = again.most_common(1)[0]
    if often < BATCHES_AGAIN:
        return None
    steps = run.steps()
    trials = math.log(len(run.sample_ranks) ** 2 * steps) + often * math.log(steps)
    if trials + often * log_equal_batches(smallest, known) > math.log(REPEATED_BATCHES):
        return None
    what = f"in {often} of {steps} steps rank {rank} trains on the samples that rank {other} had"
    return rule.failed(
        f"{what} {count(later, 'step')} before, while others were not yet seen", run.data_line()
    )


def _later_epochs(rule: Rule, evidence: Evidence) -> Finding | None:
    """Ranks share samples in a later epoch of the survey run that they had apart in the first."""
    found = later_epoch(evidence)
    if found is None:
        return None
    what = (
        f"epoch {found.number} of the survey run: {found.shared} of {found.samples} samples are"
        f" trained on by several ranks, {found.left_out} by none (expected: each by one rank, as in"
        " epoch 1)"
    )
    return rule.failed(what, found.epoch.begun.at_line)


# In this order: what a sampler or a line of the script says comes before what only samples show.
CASES: tuple[Callable[[Rule, Evidence], Finding | None], ...] = (
    _parts,
    _divided,
    _orders,
    _later,
    _later_epochs,
)


def _had_before(run: Run) -> tuple[Counter[tuple[int, int, int]], int, int]:
    """(how often a rank has for the first time a batch that another one had some steps before, by
    (rank, other, steps); the size of the smallest of these batches; how many samples were seen).

    Only in steps in which a rank has new samples alone: once all were seen, an epoch begins.
    """
    seen: dict[frozenset[tuple[int, int]], dict[int, int]] = {}  # {batch: {rank: its last step}}
    known: set[int] = set()
    again: Counter[tuple[int, int, int]] = Counter()
    sizes: list[int] = []
    for step in range(1, run.steps() + 1):
        own = run.rows(step)
        batches = {rank: frozenset(own[rank].items()) for rank in run.sample_ranks if own[rank]}
        new = any(known.isdisjoint(own[rank]) for rank in batches)
        for rank, batch in batches.items():
            before = seen.get(batch, {})
            if new and rank not in before:
                again.update((rank, other, step - last) for other, last in before.items())
                sizes += [len(batch)] if before else []
        for rank, batch in batches.items():
            seen.setdefault(batch, {})[rank] = step
            known.update(own[rank])
    return again, min(sizes, default=0), len(known)


def _are_changed(samples: int, run: Run, single: Run | None) -> bool:
    """Whether far fewer of so many samples are known again in the run of one process than by
    chance: reading augments them.
    """
    if single is None or single.steps() == 0:
        return False
    mine, alone = (
        set().union(*(one.global_batch(k) for k in range(1, one.steps() + 1)))
        for one in (run, single)
    )
    by_chance = len(mine) * len(alone) / samples
    return by_chance >= MANY and MANY * len(mine & alone) < by_chance


def _begun(trace: Trace) -> dict[Place | None, list[Sampler]]:
    """By line, the shuffled orders that samplers of several parts have begun before the last
    backward: those begun later have trained nothing.
    """
    made = (*trace.of(Micro), *trace.of(Batch))  # of these those that the run records
    last = max((one.seq for one in made), default=-1)
    found: dict[Place | None, list[Sampler]] = {}
    for record in trace.of(Sampler):
        if record.seq < last and record.shuffle and record.parts > 1:
            found.setdefault(record.at_line, []).append(record)
    return found


# for each rank {step: the samples of an order}, and whether the next one was drawn
Used = list[tuple[dict[int, set[int]], bool]]


def _own_orders(traces: list[Trace]) -> Iterator[tuple[Place, int, list[Used]]]:
    """(line, number of samples, what each rank has used of each order) where each rank has drawn
    other orders from the first on.
    """
    drawn = [_by_line(trace) for trace in traces]
    for key in drawn[0]:
        orders = [one.get(key, []) for one in drawn]
        digests = [own[0].digest for own in orders if own]
        if len(digests) == len(traces) and len(set(digests)) > 1:
            place = orders[0][0].at_line
            used = [_used(trace, own) for trace, own in zip(traces, orders, strict=True)]
            if place is not None:
                yield (
                    place,
                    orders[0][0].samples,
                    [list(ranks) for ranks in zip(*used, strict=False)],
                )


def _by_line(trace: Trace) -> dict[tuple[str, int, int], list[Order]]:
    """The orders that a rank has drawn, by line and number of samples."""
    found: dict[tuple[str, int, int], list[Order]] = {}
    for record in trace.of(Order):
        if record.at_line is not None:
            found.setdefault((record.at_line.file, record.at_line.line, record.samples), []).append(
                record
            )
    return found


def _used(trace: Trace, orders: list[Order]) -> Used:
    """For each order of a line what was trained on until the next one was drawn."""
    found: Used = []
    for number, order in enumerate(orders):
        end = orders[number + 1].seq if number + 1 < len(orders) else math.inf
        rows: dict[int, set[int]] = {}
        for micro in trace.of(Micro):
            if order.seq < micro.seq < end:
                rows.setdefault(micro.step, set()).update(micro.rows)
        found.append((rows, end < math.inf))
    return found


def _taken_by_rank(sources: Sources, place: Place) -> bool:
    """Whether the code takes by the rank what it has drawn at a line: `order[rank::world]`,
    `self.order(epoch)[rank]`.
    """
    tree = sources.tree(place.file)
    around = [
        node
        for node in walk(tree)
        if isinstance(node, ast.FunctionDef) and _covers(node, place.line)
    ]
    scope: ast.AST = around[-1] if around else tree
    variables = {
        part
        for node in walk(scope)
        if isinstance(node, ast.stmt)
        for part in _drawn_into(node, place.line)
    }

    def drawn(node: ast.AST, inside: bool) -> bool:
        if isinstance(node, ast.Call):
            return _last(node.func) == place.function or (
                _covers(node, place.line) and _last(node.func) == "randperm"
            )
        return (inside or isinstance(node, ast.Attribute)) and ast.unparse(node) in variables

    within = {id(node) for node in walk(scope)}
    parts = (node for node in walk(tree) if isinstance(node, ast.Subscript))
    by_rank = (one for one in parts if any(_last(part) in RANK_NAMES for part in walk(one.slice)))
    return any(drawn(part, id(part) in within) for one in by_rank for part in walk(one.value))


def _drawn_into(node: ast.stmt, line: int) -> list[str]:
    """The variables that hold what a statement at a line draws, or shuffles in place."""
    if isinstance(node, ast.Assign) and _covers(node, line):
        return [ast.unparse(target) for target in node.targets]
    if isinstance(node, ast.For) and _covers(node.iter, line):
        return [ast.unparse(node.target)]
    call = node.value if isinstance(node, ast.Expr) and _covers(node, line) else None
    return [ast.unparse(call.args[0])] if isinstance(call, ast.Call) and call.args else []


def _covers(node: ast.stmt | ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _last(node: ast.AST) -> str:
    """The last name of an expression: `shuffle` of `random.shuffle`."""
    return (
        node.id
        if isinstance(node, ast.Name)
        else node.attr
        if isinstance(node, ast.Attribute)
        else ""
    )
