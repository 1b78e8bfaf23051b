"""State beside the weights: the values that the ranks recorded at each step, and which of them a
training loop depends on.
"""

import ast
import math
from typing import TypeGuard

from ..evidence import Sources
from ..tolerances import LEAST_ELEMENTS
from ..trace import Run, Trace, difference
from ..trace.events import Held, State
from ..trace.sketches import add
from .decisive_names import carried, read_in, timed
from .evaluation_names import evaluations, from_evaluations, leading_to
from .syntax import called, functions_of, last_name, loops, names_read, walk

Values = dict[str, Held]
# What torch itself saves in a checkpoint: every number of these is state. Elsewhere a number may be
# for a log.
KEPT = (
    "module",
    "parameter",
    "optimizer",
    "scheduler",
    "scaler",
)  # holders whose every number is state


def states(trace: Trace) -> dict[int, Values]:
    """{step: all that one rank held when the first forward of that step began}."""
    found: dict[int, Values] = {}
    now: Values = {}
    for record in trace.of(State):
        now = {
            path: held for path, held in now.items() if path not in set(record.gone)
        } | record.values
        found[record.step] = now  # of the last one
    return found


def whole(run: Run, step: int, rank: int = 0) -> Values:
    """{path: the value of one rank, of a sharded tensor the whole one} at a step; {} unless all
    ranks recorded it.
    """
    ranks = [states(trace).get(step) for trace in run.traces]
    if not ranks or any(values is None for values in ranks):
        return {}
    found = dict(ranks[rank] or {})
    for path, held in found.items():
        if held.sharded:
            parts = [
                one
                for values in ranks
                if (one := (values or {}).get(path)) is not None and one.copy == 0
            ]
            total: list[float] | None = None
            for sketch in (part.sketch for part in parts if part.sketch is not None):
                total = add(total, sketch)
            found[path] = Held(holder=held.holder, sketch=total, numel=held.numel, dtype=held.dtype)
    return found


def evolving(run: Run, rank: int = 0) -> set[str]:
    """The paths whose value on one rank is not the same at every step at which they are there."""
    first: dict[str, Held] = {}
    changed: set[str] = set()
    for values in states(run.traces[rank]).values() if run.traces else ():
        for path, held in values.items():
            if path in first and apart(first[path], held) != 0.0:
                changed.add(path)
            first.setdefault(path, held)
    return changed


def apart(a: Held, b: Held) -> float:
    """Difference of two values, relative to the larger; infinite if they are of different kinds or
    sizes.
    """
    if a.value is not None and b.value is not None:
        # NaN on both sides is the same value: a best loss that was not computed yet.
        if a.value == b.value or (math.isnan(a.value) and math.isnan(b.value)):
            return 0.0
        if not (math.isfinite(a.value) and math.isfinite(b.value)):
            return math.inf
        return abs(a.value - b.value) / max(abs(a.value), abs(b.value))
    if a.sketch is None or b.sketch is None or a.numel != b.numel:
        return math.inf
    if a.sketch == b.sketch:
        return 0.0
    size = math.sqrt(max(a.sketch[0], b.sketch[0]))
    return difference(a.sketch, b.sketch) / size if size > 0.0 else 0.0


def assigned_anew(sources: Sources) -> set[tuple[str, str]]:
    """(function, name) of what each iteration of a loop assigns, from other values than itself: a
    batch, a loss.
    """
    found: set[tuple[str, str]] = set()
    for function in functions_of(sources):
        for stmt in (n for loop in loops(function) for n in loop.body if isinstance(n, ast.Assign)):
            names = {
                n.id for target in stmt.targets for n in walk(target) if isinstance(n, ast.Name)
            }
            # What each iteration assigns from other values (a batch, a loss) is not carried on, so
            # a resume need not restore it (exam round 3: recomputed values of right scripts).
            found |= {(function.name, name) for name in names - read_in(stmt.value)}
    return found


def of_one_branch(sources: Sources) -> set[tuple[str, str]]:
    """(function, name) of what a branch of a loop assigns before it reads it, and nothing else
    reads: a sum for a log.
    """
    found: set[tuple[str, str]] = set()
    for function in functions_of(sources):
        reads = [
            n for n in walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
        ]
        for branch in (n for loop in loops(function) for n in walk(loop) if isinstance(n, ast.If)):
            for number, stmt in enumerate(branch.body):
                if isinstance(stmt, ast.Assign) and all(
                    isinstance(target, ast.Name) for target in stmt.targets
                ):
                    after = {id(n) for other in branch.body[number + 1 :] for n in walk(other)}
                    names = {last_name(target) for target in stmt.targets}
                    found |= {
                        (function.name, x)
                        for x in names
                        # A sum for a log that one branch of the loop makes and reads is no state
                        # (exam r7 fa_05_moe_balance_bias twin: `main.stats`).
                        if all(id(n) in after for n in reads if n.id == x)
                    }
    return found


def begun_anew(sources: Sources) -> set[str]:
    """The functions that a loop calls for each step: their variables do not outlive it.

    One whose own loop makes steps goes on.
    """
    stepping = leading_to(sources, "step")
    called_in_loops = {
        name
        for function in functions_of(sources)
        for loop in loops(function)
        for name in called(loop)
    }
    goes_on = {
        f.name
        for f in functions_of(sources)
        if any(called(loop) & stepping for loop in loops(f))
        or any(isinstance(n, ast.Yield) for n in walk(f))
    }
    # Variables of a function that is called for each step end with it; one with a loop of steps, or
    # a generator, goes on (exam r6: fix of round 6; no case by name).
    return (called_in_loops & stepping) - goes_on


def results_of_calls(sources: Sources) -> set[str]:
    """The attributes that methods of a class set before they read them, or that each forward sets
    anew: results of the last call.
    """
    found: set[str] = set()
    kept: set[str] = set()
    anew: set[str] = set()
    summed: set[str] = set()
    for cls in (
        n
        for file in sources.project
        for n in walk(sources.tree(file))
        if isinstance(n, ast.ClassDef)
    ):
        for method in (
            n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name != "__init__"
        ):
            nodes = list(walk(method))
            ends = {
                id(t): n.end_lineno
                for n in nodes
                if isinstance(n, ast.Assign)
                for one in n.targets
                for t in walk(one)
            }
            summed |= {last_name(n.target) for n in nodes if isinstance(n, ast.AugAssign)}
            own = [
                n for n in nodes if isinstance(n, ast.Attribute) and last_name(n.value) == "self"
            ]
            order = sorted(
                (ends.get(id(n), n.lineno) or 0, isinstance(n.ctx, ast.Store), n.attr) for n in own
            )
            for attr in {attr for _, _, attr in order}:
                first = next(stored for _, stored, name in order if name == attr)
                (found if first else kept).add(attr)
                anew |= {attr} if first and method.name in ("forward", "__call__") else set()
    # Attributes that each forward sets anew are its results (round 4 k_12 `routed`, round 8 ga_16
    # `_last`); sums (+=) are state (exam r4 (attributes that a forward overwrites:
    # k_12_moe_balance), r8 ga_16_vqvae_codebook_ema).
    return ((found - kept) | anew) - summed


def attribute(path: str) -> str:
    """The attribute of a path that holds its value: `model.book._last[0]` -> `_last`."""
    # `book._last[0]` belongs to the attribute `_last`, not to `_last[0]` (exam r8
    # ga_16_vqvae_codebook_ema).
    return path.partition("[")[0].rpartition(".")[2]


def restorable(path: str, held: Held, decisive: set[str]) -> bool:
    """Whether a value that evolves is state that a resumed run must have again: what only logs read
    is not.
    """
    if held.holder == "module":
        # A plain number of a module is often a counter for a log; a tensor of it is state, a number
        # only if it decides something (exam round 1).
        return held.dtype not in ("int", "float", "bool") or path in decisive
    return (
        held.holder in KEPT
        or path in decisive
        or (held.sketch is not None and held.numel >= LEAST_ELEMENTS)
    )


def decisive(sources: Sources, paths: set[str]) -> set[str]:
    """Of these paths the numbers that the loop carries along and that decide something: a best
    value, a patience, a position.

    It is assigned from itself or under a condition that reads it, and a condition that reads it
    does more than log.
    """
    named = {one for file in sources.project for one in carried(sources.tree(file))}
    return {path for path in paths - measuring(sources, paths) if spelled(path) & named}


def measuring(sources: Sources, paths: set[str]) -> set[str]:
    """Of these paths the times and sums of times."""
    named = {one for file in sources.project for one in timed(sources.tree(file))}
    return {path for path in paths if spelled(path) & named}


def spelled(path: str) -> set[tuple[str, str]]:
    """(function, expression) by which the sources may name a path; an attribute of an object is
    `self.name` in any method.
    """
    scope, dot, rest = path.partition(".")
    found = {("", path), (scope, rest)} if dot else {("", path)}
    # An attribute may be read as `self.name` in a method of any class: it counts there too.
    return found | {("", f"self.{path.rpartition('.')[2]}")} if dot else found


def evaluated(run: Run, sources: Sources) -> set[str]:
    """The paths of numbers that rank 0 computes in evaluations: they change, or appear, only over
    steps with forwards without gradients, and the sources compute them there. A training loss in a
    script with such forwards in each step is none of them.
    """
    if not run.traces:
        return set()
    records = run.traces[0].of(State)
    found: dict[str, bool] = {}
    now: Values = {}
    for before, record in zip([None, *records], records, strict=False):
        quiet = before is not None and record.evaluations == before.evaluations
        for path, held in record.values.items():
            number = (
                held.value is not None
                and held.holder in ("local", "object")
                and held.dtype.startswith("float")
            )
            if before is None or not number:
                found[path] = False
            # A value that once changes without an evaluation is a training loss, which each rank
            # has for itself (exam round 1).
            elif path not in now or apart(now[path], held) != 0.0:
                found[path] = found.get(path, True) and not quiet
        now = now | record.values
    named = {
        one
        for file in sources.project
        for one in from_evaluations(sources.tree(file), evaluations(sources))
    }
    return {
        path
        for path, only in found.items()
        if only and (spelled(path) | spelled(_holding(path))) & named
    }


def _holding(path: str) -> str:
    """The variable of a path: `main.metrics['r2']` -> `main.metrics`."""
    return path.partition("[")[0]


# A rank's own number that is only put into a mean over ranks may differ from one process (exam r3
# j_02_grpo_groups twin: `main.kl`).
def handed_on(sources: Sources, path: str) -> bool:
    """Whether a local number is read only to compute another variable, such as its mean over
    ranks.
    """
    scope, _, name = _holding(path).rpartition(".")
    found = []
    for nodes in (
        list(walk(function)) for function in functions_of(sources) if function.name == scope
    ):
        inside = {id(n) for stmt in nodes if isinstance(stmt, ast.Assign) for n in walk(stmt.value)}
        others = {id(n.value) for n in nodes if _other_entry(n, path)}
        named = (n for n in nodes if isinstance(n, ast.Name) and n.id == name)
        found += [
            id(n) in inside for n in named if isinstance(n.ctx, ast.Load) and id(n) not in others
        ]
    return bool(found) and all(found)


def _other_entry(node: ast.AST, path: str) -> TypeGuard[ast.Subscript]:
    """Whether a node reads another entry of a dict than that of a path, `main.m['loss']`: one may
    be the same on all ranks and printed as it is (verl, `grad_norm`).
    """
    key = getattr(getattr(node, "slice", None), "value", None)
    return isinstance(node, ast.Subscript) and isinstance(key, str) and f"[{key!r}]" not in path


# A sum over ranks that is divided where it is printed is twice that of one process by right (exam
# r5 p_10_rollback_root, p_16_schedule_free: `main.v` twice that of one process).
def divided(sources: Sources, path: str) -> bool:
    """Whether a local number is divided, or multiplied, where it is read: a sum over ranks of which
    no mean is kept.
    """
    scope, _, name = _holding(path).rpartition(".")
    for node in (
        n for function in functions_of(sources) if function.name == scope for n in walk(function)
    ):
        if (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.Div | ast.Mult)
            and name in names_read(node)
        ):
            return True
    return False
