import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from ...analysis.buffer_reads import equal_where_read
from ...analysis.comparison import compare, parted
from ...analysis.limits import limits
from ...analysis.state import (
    KEPT,
    Values,
    apart,
    attribute,
    decisive,
    evolving,
    results_of_calls,
    states,
)
from ...tolerances import LEAST_ELEMENTS, SAME_ON_RANKS
from ...trace.events import Held, State
from ..base import Evidence, Finding, Rule, Run, some

_BUFFER = re.compile(r"^model\d*\.")  # of a model that is trained
# Buffers of these decide what a model computes in evaluation; integer ones count.
_FLOATS = ("float64", "float32", "bfloat16", "float16")
UNREDUCED = ", a parameter outside every fully_shard module, whose gradient nothing reduces"


class StateSameOnRanks(Rule):
    """Ranks that hold the same state hold the same values.

    Why: buffers, learning rates and the numbers on which a loop decides are not sharded: every rank
    has its own copy, and only the same computation on the same numbers keeps the copies equal.
    Running statistics of local batches, a plateau schedule on a local loss or a best score of one
    rank let the copies drift apart. The saved model is then that of one rank.
    Wrong:
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        scheduler.step(loss.item())  # this rank's loss
    Right:
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        scheduler.step(loss.item())
    Fix: Reduce what the state is computed from over all ranks (`dist.all_reduce`,
    `nn.SyncBatchNorm`), or compute it on one rank and broadcast it. Register a parameter that
    stands alone in the sharded module, or reduce its gradient.
    Source: law L5: at the first forward of each step the probe records on every rank the buffers of
    modules, the settings of optimizers, schedulers and scalers, and the numbers on which the loop
    decides. A tensor of another object may be of one rank (a replay buffer), but not where the
    samples are those of one process until it differs between ranks.
    """

    in_windows = True
    reads = frozenset({"single"})

    explains = (  # a checkpoint holds the value of one rank
        "per-rank-state-deduplicated",
        "scheduler-or-progress-not-restored",
        "state-restored",
    )

    def applies(self, evidence: Evidence) -> str:
        return "one rank has the only copy" if evidence.trained.world_size == 1 else ""

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        ranks = [states(trace) for trace in run.traces]
        last = max((step for step in ranks[0] if all(step in rank for rank in ranks)), default=0)
        if not last:
            return self.unknown("no state was recorded on all ranks")
        held = {path: one for path, one in ranks[0][last].items() if not one.sharded}
        shared, compared = _shared(evidence, held)
        found: dict[str, str] = {}
        for path in sorted(compared):
            copies = Copies(path, held[path], ranks, last, run)
            if copies.differ and not (
                any(meant(copies) for meant in MEANT) or equal_where_read(evidence, path)
            ):
                found[path] = copies.words()
        found |= self._drawn_from(evidence, ranks)
        if found:
            what = (
                f"at step {last} the {run.world_size} ranks hold different values of"
                f" {some(found.values(), 3)}"
            )
            # Ranks may keep what they like in objects and lists of their own (a cache, a replay
            # memory): it counts only beside another failure (exam round 8,
            # ga_16_vqvae_codebook_ema).
            own = all(
                path in held and held[path].value is None and _of_an_object(path, held[path])
                for path in found
            )
            return self.failed(what, run.places(State)[0].at_line, suspicion=own)
        return self.passed(
            f"{len(shared)} values are equal on all {run.world_size} ranks up to step {last}"
        )

    def _drawn_from(self, evidence: Evidence, ranks: list[dict[int, Values]]) -> dict[str, str]:
        """{path: in words} of tensors of objects that first differ between ranks when the samples
        first are not those of one process: each rank draws from its own copy (exam round 3,
        j_07_hard_mining).
        """
        single = evidence.single
        step = parted(evidence.trained, single) if single is not None and single.completed else None
        if single is None or step is None:
            return {}
        if any(number not in rank for rank in ranks for number in (step - 1, step)):
            return {}
        # What a model makes (the fakes of a GAN) differs in its rounding only, where all measures
        # agree (exam round 9, hb_10_wgan_clip).
        measures = compare(evidence.trained, single, step).measures
        if not limits(evidence, "matches-single-process").over(measures):
            return {}
        return {
            path: f"`{path}`: from step {step} on the samples are others than those of one process"
            for path, held in ranks[0][step].items()
            if _is_table(held) and _parts_at(ranks, path, step)
        }


@dataclass(frozen=True)
class Copies:
    """What the ranks hold of a path at the last step that all of them recorded."""

    path: str
    mine: Held  # of rank 0
    ranks: list[dict[int, Values]]
    last: int
    run: Run

    @cached_property
    def there(self) -> list[Held]:
        return _at(self.ranks, self.last, self.path)

    @property
    def differ(self) -> bool:
        return len(self.there) == len(self.ranks) and _apart(self.there) > SAME_ON_RANKS

    @property
    def began_apart(self) -> bool:
        """Whether they differ at the first step at which all ranks have it, too."""
        steps = sorted(self.ranks[0])
        all_have = (
            there
            for step in steps
            if len(there := _at(self.ranks, step, self.path)) == len(self.ranks)
        )
        return _apart(next(all_have, self.there)) > SAME_ON_RANKS

    def words(self) -> str:
        numbers = [f"{v.value:.6g}" for v in self.there if v.value is not None]
        text = f"`{self.path}`" + (f" ({', '.join(numbers[:4])})" if numbers else "")
        return text + (UNREDUCED if self.mine.holder == "parameter" else "")


def _of_a_part(copies: Copies) -> bool:
    """Experts or a table of which each rank has a part carry buffers of their part (exam round 9,
    ha_09_expert_parallel; round 6, w_14_rowparallel_table).
    """
    return copies.mine.holder == "module" and _inside(copies.path, _of_one_rank(copies.run))


def _own_from_the_beginning(copies: Copies) -> bool:
    """A parameter or a tensor of an optimizer that differs from the first step on is a rank's part
    of something (exam round 3, j_13_lbfgs_two_loop); a number that does, such as a position, is
    the rank's own. Running statistics that do are not.
    """
    mine = copies.mine
    part = mine.holder == "parameter" or (mine.holder == "optimizer" and mine.sketch is not None)
    return (part or not _is_state(mine)) and copies.began_apart


def _of_an_optimizer_of_shards(copies: Copies) -> bool:
    """What an optimizer keeps of sharded parameters is of this rank's shards, under whatever name:
    moments in lists of its own, factors of a preconditioner (facebookresearch/optimizers@f606606).
    A number that it keeps (a norm, a count) is for all of them.
    """
    mine, sharded = (
        copies.mine,
        any(entries[0].sharded for entries in copies.run.parameters.values()),
    )
    return sharded and mine.holder == "optimizer" and mine.sketch is not None and mine.numel > 1


def _as_long_as_own_samples(copies: Copies) -> bool:
    """A cache of a module whose length differs between ranks is of the rank's own samples."""
    return copies.mine.holder == "module" and len({one.numel for one in copies.there}) > 1


# Why the copies of ranks may differ.
MEANT: tuple[Callable[[Copies], bool], ...] = (
    _of_a_part,
    _own_from_the_beginning,
    _of_an_optimizer_of_shards,
    _as_long_as_own_samples,
)


def _shared(evidence: Evidence, held: Values) -> tuple[set[str], set[str]]:
    """(the paths that all ranks should have the same values of, those of them that are compared).

    State by its holder, and numbers on which the loop decides.
    """
    run = evidence.trained
    changing = evolving(run)
    results = results_of_calls(evidence.sources)
    # What each forward sets anew from a call is a result of the rank's last batch (exam round 4,
    # k_12_moe_balance).
    kept = {
        path
        for path, one in held.items()
        if _is_state(one) and not (one.holder == "module" and attribute(path) in results)
    }
    numbers = {
        path
        for path, one in held.items()
        if one.value is not None and one.dtype.startswith("float")
    }
    paths = kept | (decisive(evidence.sources, changing) & numbers)
    buffers: set[str] = set()
    # With tensor parallelism ranks hold parts of a layer, whose buffers may differ.
    if len(run.data_ranks) == run.world_size:
        buffers = {p for p, one in held.items() if _BUFFER.match(p) and one.dtype in _FLOATS}
    return paths, changing.intersection(paths) | (buffers & kept)


def _at(ranks: list[dict[int, Values]], step: int, path: str) -> list[Held]:
    """What those ranks hold of a path that have it at a step."""
    found = (rank.get(step, {}).get(path) for rank in ranks)
    return [one for one in found if one is not None]


def _is_table(held: Held) -> bool:
    """Whether a value is a tensor of an object, large enough to draw samples from."""
    return (
        held.holder == "object"
        and not held.sharded
        and held.sketch is not None
        and held.numel >= LEAST_ELEMENTS
    )


def _parts_at(ranks: list[dict[int, Values]], path: str, step: int) -> bool:
    """Whether all ranks hold the same before a step, and not at it."""
    before, now = _at(ranks, step - 1, path), _at(ranks, step, path)
    return len(before) == len(now) == len(ranks) and _apart(before) <= SAME_ON_RANKS < _apart(now)


def _of_one_rank(run: Run) -> set[str]:
    """The modules with plain parameters of which each rank has other values from the beginning."""
    plain = {
        name: entries
        for name, entries in run.parameters.items()
        if not any(e.managed or e.sharded for e in entries)
    }
    apart = (
        name
        for name, entries in plain.items()
        if any(e.sketch != entries[0].sketch for e in entries)
    )
    return {_BUFFER.sub("", name).rpartition(".")[0] for name in apart}


def _inside(path: str, modules: set[str]) -> bool:
    """Whether a value is held by one of these modules."""
    return _BUFFER.match(path) is not None and _BUFFER.sub("", path).rpartition(".")[0] in modules


def _of_an_object(path: str, held: Held) -> bool:
    """Whether a value is no buffer, parameter or setting, but what the script keeps in objects and
    lists of its own.
    """
    return held.holder in ("object", "local") or (held.holder == "module" and "[" in path)


def _is_state(held: Held) -> bool:
    """Whether a value is state by its holder; a plain number of a module may count what a rank
    likes (calls, its own cursor).
    """
    return held.holder in KEPT and not (
        held.holder == "module" and held.dtype in ("int", "float", "bool")
    )


def _apart(values: list[Held]) -> float:
    return max((apart(values[0], value) for value in values), default=0.0)
