from functools import partial

from ...analysis.agreement import Agree, Noise, Sides, noise
from ...analysis.state import Values, apart, states
from ...config.watch import FILES, Watched
from ...trace.events import Held, State
from ..base import Evidence, Finding, Rule, count


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
            watched = partial(_of, one)
            if not any(watched(values) for values in states(evidence.trained.traces[0]).values()):
                return self._nowhere(one)
            compared: dict[str, int] = {}
            for sides in Agree(watched, one.across).sides(evidence):
                compared[sides.where] = sides.step
                if found := self._apart(evidence, sides, known):
                    return found
            # A watched value that no other run or rank holds proves nothing: inconclusive, never a
            # pass.
            if not compared:
                return self.unknown(
                    f"`{one.expression}` is held by no other run or rank: nothing was compared"
                )
            passes.append(f"{one.expression}: {', '.join(compared)}")
        return self.passed(f"{count(len(passes), 'watched value')} agree ({'; '.join(passes)})")

    def _nowhere(self, one: Watched) -> Finding:
        where = "was found in no frame of the training loop: give it as its function names it"
        if one.expression.startswith(FILES):
            where = "is no file that the steps that were run have written and that can be read"
        return self.unknown(f"`{one.expression}` {where}")

    def _apart(self, evidence: Evidence, sides: Sides, known: Noise) -> Finding | None:
        """What differs between two sides, or is there on one of them only."""
        when = f"{sides.where}, before step {sides.step}"
        for path in sides.both():
            mine, theirs = sides.one[path], sides.other[path]
            value = apart(mine, theirs)
            limit = 0.0 if sides.exact else known.limit(f"watch {path}")
            # Tensors of other sizes are those of other samples, such as a rest of a batch.
            if value > limit and mine.numel == theirs.numel:
                text = f"`{path}` differs {when}: {_shown(mine)} and {_shown(theirs)}"
                records = evidence.trained.places(State)
                line = next((r.at_line for r in records if r.step == sides.step), None)
                text += f" (allowed: {limit:.1g} apart)"
                return self.failed(text, line, measured=value, limit=limit)
        if gone := sorted(sides.one.keys() ^ sides.other.keys()):
            return self.failed(f"`{gone[0]}` is there on one side only {when}")
        return None


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


def _shown(held: Held) -> str:
    if held.value is not None:
        return f"{held.value:.6g}"
    return f"({held.numel} elements, norm {max((held.sketch or [0.0])[0], 0.0) ** 0.5:.6g})"
