import re

from ...analysis.comparison import compare, limits, parted
from ...analysis.state import (
    KEPT,
    LEAST,
    Values,
    apart,
    attribute,
    decisive,
    evolving,
    results_of_calls,
    states,
)
from ...trace.events import Held, State
from ..base import Evidence, Finding, Rule, Run, some

SAME = 1e-5  # relative
_BUFFER = re.compile(r"^model\d*\.")  # of a model that is trained
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
        changing = evolving(run)
        deciding = decisive(evidence.sources, changing)
        last = max((step for step in ranks[0] if all(step in rank for rank in ranks)), default=0)
        if not last:
            return self.unknown("no state was recorded on all ranks")
        found: dict[str, str] = {}
        held = {path: one for path, one in ranks[0][last].items() if not one.sharded}
        floats = {
            path
            for path, one in held.items()
            if one.value is not None and one.dtype.startswith("float")
        }
        results = results_of_calls(evidence.sources)
        kept = {path for path, one in held.items() if _is_state(one)}
        kept -= {p for p in kept if held[p].holder == "module" and attribute(p) in results}
        paths = kept | (deciding & floats)
        buffers = {
            path for path, one in held.items() if _BUFFER.match(path) and one.dtype in _FLOATS
        }
        # those of a part of a layer may differ
        buffers = buffers if len(run.data_ranks) == run.world_size else set()
        own = _of_one_rank(
            run
        )  # a table or experts of which each rank has a part, and what they carry along
        for path in sorted(changing.intersection(paths) | (buffers & kept)):
            if held[path].holder == "module" and _inside(path, own):
                continue
            there = [one for rank in ranks if (one := rank[last].get(path))]
            steps = (
                step
                for step in sorted(ranks[0])
                if all(path in rank.get(step, {}) for rank in ranks)
            )
            began = next(([rank[step][path] for rank in ranks] for step in steps), there)
            mine = held[path]
            part = mine.holder == "parameter" or (
                mine.holder == "optimizer" and mine.sketch is not None
            )
            meant = (part or not _is_state(mine)) and _apart(
                began
            ) > SAME  # it differs from the beginning
            sizes = {one.numel for one in there}
            meant |= (
                mine.holder == "module" and len(sizes) > 1
            )  # a cache as long as the rank's own samples
            if len(there) == len(ranks) and _apart(there) > SAME and not meant:
                numbers = [f"{v.value:.6g}" for v in there if v.value is not None]
                found[path] = f"`{path}`" + (f" ({', '.join(numbers[:4])})" if numbers else "")
                found[path] += UNREDUCED if mine.holder == "parameter" else ""
        found |= self._drawn_from(evidence, ranks)
        if found:
            what = (
                f"at step {last} the {run.world_size} ranks hold different values of"
                f" {some(found.values(), 3)}"
            )
            meant = all(
                path in held and held[path].value is None and _of_an_object(path, held[path])
                for path in found
            )
            return self.failed(what, run.places(State)[0].at_line, suspicion=meant)
        return self.passed(
            f"{len(paths)} values are equal on all {run.world_size} ranks up to step {last}"
        )

    def _drawn_from(self, evidence: Evidence, ranks: list[dict[int, Values]]) -> dict[str, str]:
        """{path: in words} of tensors of objects that first differ between ranks when the samples
        first are not those of one process.
        """
        single = evidence.single
        step = parted(evidence.trained, single) if single is not None and single.completed else None
        if (
            single is None
            or step is None
            or any(number not in rank for rank in ranks for number in (step - 1, step))
        ):
            return {}
        if not limits(evidence, "matches-single-process").over(
            compare(evidence.trained, single, step).measures
        ):
            return {}  # what a model makes (the fakes of a GAN) differs in its rounding only
        found = {}
        for path, held in ranks[0][step].items():
            before, now = (
                [one for rank in ranks if (one := rank[number].get(path))]
                for number in (step - 1, step)
            )
            tensor = (
                held.holder == "object"
                and not held.sharded
                and held.sketch is not None
                and held.numel >= LEAST
            )
            if (
                tensor
                and len(before) == len(now) == len(ranks)
                and _apart(before) <= SAME < _apart(now)
            ):
                found[path] = (
                    f"`{path}`: from step {step} on the samples are others than those of one"
                    " process"
                )
        return found


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
    """Whether a value is state by its holder; a plain number of a module may count what it
    likes.
    """
    return held.holder in KEPT and not (
        held.holder == "module" and held.dtype in ("int", "float", "bool")
    )


def _apart(values: list[Held]) -> float:
    return max((apart(values[0], value) for value in values), default=0.0)
