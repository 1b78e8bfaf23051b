from collections.abc import Iterator

from ...analysis.comparison import FLOOR, MULTIPLE
from ...analysis.state import Values, apart, noise, states, whole
from ...config.watch import FILES, Watched
from ...trace.events import Held, State
from ..base import Evidence, Finding, Rule, Run, count

Pair = tuple[
    str, int, dict[str, Held], dict[str, Held], float
]  # where, step, two sides, limit beside the noise


class WatchedValuesAgree(Rule):
    """What `--watch` names has the same value on all ranks, after a resume, on other numbers of
    ranks and in one process.

    Why: a suspicion about a value that no rule knows (an average, a best value, a replay buffer) is
    proved or refuted by one run.
    Wrong:
        best_loss = min(best_loss, loss.item())  # this rank's loss
    Right:
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        best_loss = min(best_loss, loss.item())
    Fix: Compute the value from what all ranks share (all-reduce it), save and restore it; if ranks
    may differ, write `rank-local` after the expression.
    Source: laws L5 and L6: at each step the expression is evaluated in the frames of the training
    loop.
    """

    names_a_cause = False
    reads = frozenset(
        {
            "full_precision",
            "reference",
            "perturbed",
            "single",
            "resume",
            "resume_full_precision",
            "reshard",
        }
    )

    def applies(self, evidence: Evidence) -> str:
        return "" if evidence.watch else "no value is watched (--watch)"

    def judge(self, evidence: Evidence) -> Finding:
        known, passes = noise(evidence), []
        for one in evidence.watch:
            if not any(_of(one, values) for values in states(evidence.trained.traces[0]).values()):
                where = (
                    "was found in no frame of the training loop: give it as its function names it"
                )
                if one.expression.startswith(FILES):
                    where = (
                        "is no file that the steps that were run have written and that can be read"
                    )
                return self.unknown(f"`{one.expression}` {where}")
            compared: dict[str, int] = {}
            for where, step, mine, theirs, least in _pairs(one, evidence):
                compared[where] = step
                for path in sorted(mine.keys() & theirs.keys()):
                    value = apart(mine[path], theirs[path])
                    limit = least + (MULTIPLE * known.get(f"watch {path}", 0.0) if least else 0.0)
                    if value > limit and mine[path].numel == theirs[path].numel:
                        text = (
                            f"`{path}` differs {where}, before step {step}: {_shown(mine[path])}"
                            f" and {_shown(theirs[path])}"
                        )
                        line = next(
                            (r.at_line for r in evidence.trained.places(State) if r.step == step),
                            None,
                        )
                        return self.failed(
                            f"{text} (allowed: {limit:.1g} apart)",
                            line,
                            measured=value,
                            limit=limit,
                        )
                if gone := sorted(mine.keys() ^ theirs.keys()):
                    return self.failed(
                        f"`{gone[0]}` is there on one side only {where}, before step {step}"
                    )
            if not compared:
                return self.unknown(
                    f"`{one.expression}` is held by no other run or rank: nothing was compared"
                )
            passes.append(f"{one.expression}: {', '.join(compared)}")
        return self.passed(f"{count(len(passes), 'watched value')} agree ({'; '.join(passes)})")


def _of(one: Watched, values: Values) -> dict[str, Held]:
    """{path: value} of one expression."""
    prefix = f"watch {one.expression}"
    found = {
        path.removeprefix("watch "): held
        for path, held in values.items()
        if path.startswith(prefix)
    }
    return {
        path: held
        for path, held in found.items()
        if path[len(one.expression) :][:1] in ("", ".", "[")
    }


def _pairs(one: Watched, evidence: Evidence) -> Iterator[Pair]:
    train = evidence.trained
    if "ranks" in one.across:
        first, *others = [states(trace) for trace in train.traces]
        for step, values in first.items():
            mine = {path: held for path, held in _of(one, values).items() if not held.sharded}
            for rank, other in enumerate(others, 1):
                theirs = {
                    path: held
                    for path, held in _of(one, other.get(step, {})).items()
                    if not held.sharded
                }
                yield f"on rank 0 and rank {rank}", step, mine, theirs, 0.0
    after = evidence.resumed_after()
    if "resume" in one.across and evidence.resume is not None and after is not None:
        yield from _along(
            one, evidence.resume, train, after, "after the resume and without it", FLOOR
        )
    base = evidence.resume_full_precision
    if "world" in one.across and base is not None and after is not None:
        for run in evidence.reshards:
            offset = after if base is train else 0
            yield from _along(
                one, run, base, offset, f"on {run.world_size} ranks and on {base.world_size}", FLOOR
            )
    exact, single = evidence.full_precision, evidence.single
    if "single" in one.across and exact is not None and single is not None:
        yield from _along(
            one, single, exact, 0, f"in one process and on {exact.world_size} ranks", FLOOR
        )


def _along(
    one: Watched, run: Run, base: Run, after: int, where: str, least: float
) -> Iterator[Pair]:
    for step in range(1, min(run.steps(), base.steps() - after) + 1):
        mine, theirs = _of(one, whole(run, step)), _of(one, whole(base, after + step))
        if mine and theirs:
            yield where, after + step, mine, theirs, least


def _shown(held: Held) -> str:
    if held.value is not None:
        return f"{held.value:.6g}"
    return f"({held.numel} elements, norm {max((held.sketch or [0.0])[0], 0.0) ** 0.5:.6g})"
