"""Whether a script has what a rule is about: by the names in its sources, and by the records of
completed runs.
"""

import ast
import re
from collections.abc import Iterator
from functools import lru_cache

from ..evidence import LOADS, Evidence, Sources
from ..finding import Uncovered
from ..trace import Run
from ..trace.events import Checkpoint, Micro, SetState, Shard, Step, Wrap
from .syntax import walk

UNSHARDED = "no call of fully_shard was seen"
_NAMES = {ast.Name: "id", ast.Attribute: "attr", ast.keyword: "arg", ast.arg: "arg"}


def unnamed(sources: Sources, *words: str) -> str:
    """Why a script uses none of these names; "" if it may: its sources name one, or are not
    known.
    """
    if (
        not sources.project
        or not words
        or any(_names(sources, file, words) for file in sources.project)
    ):
        return ""
    return f"the sources do not use {' or '.join(words)}"


def without_steps(run: Run) -> str:
    """Why a run has no optimizer step; "" if it has one."""
    if run.steps() > 0:
        return ""
    # Evolution strategies and zeroth order have no backward: say that, not that no step was
    # recorded (exam r2 f_11_mezo, r4 n_13_evolution: inconclusive without a reason).
    if run.completed and run.traces and not run.all(Micro):
        return (
            "no backward ran: training without gradients (zeroth order, evolution strategies) is"
            " not judged"
        )
    return "the train run recorded no optimizer step"


def unsharded(run: Run) -> str:
    """Why a completed run has no sharded model; "" if it has one, or may have stopped before it."""
    sharded = any(run.places(Shard)) or any(
        entries[0].sharded for entries in run.parameters.values()
    )
    # Only a completed run with a model shows that nothing is sharded; one that stopped may have
    # come before it.
    return "" if sharded or not run.completed or not run.models else "no parameter is sharded"


def sharded_once(run: Run) -> str:
    """Why a completed run has no sharded module inside another; "" if it may have."""
    return "fully_shard is called once" if len(run.places(Shard)) == 1 else ""


def meshes(run: Run) -> int:
    """How many meshes (by shape, names and ranks) hold rank 0's parameters or are given to
    `fully_shard`.
    """
    entries = [e[0] for e in run.parameters.values() if e[0].sharded and e[0].rank == 0]
    given = [wrap.mesh for wrap in run.places(Wrap) if wrap.mesh is not None]
    held = {(tuple(e.mesh), tuple(e.mesh_names), tuple(e.ranks)) for e in entries}
    return len(held | {(tuple(mesh.shape), tuple(mesh.names), tuple(mesh.ranks)) for mesh in given})


def absent(run: Run | None, seen: object, reason: str) -> str:
    """The reason why a rule does not apply, if a completed run has shown nothing of the kind; ""
    otherwise.
    """
    # That something is absent is known of a completed run alone: else the rule is open.
    return "" if seen or run is None or unfinished(run) else reason


def unfinished(run: Run) -> str:
    """Why a run has not shown all that the script does; "" if it completed."""
    if not run.completed:
        return (
            f"the {run.role} run stopped before it reached what this rule checks (see"
            " run-completes)"
        )
    return "" if run.steps() else f"the {run.role} run made no optimizer step"


def trainings(evidence: Evidence) -> Iterator[Run]:
    """The runs of the unchanged script that may stop with an error of torch: train, resume,
    reshard.
    """
    yield from (
        run for run in (evidence.train, evidence.resume, *evidence.reshards) if run is not None
    )


def went_through(evidence: Evidence) -> bool:
    """Whether the train run made steps and it and the resume completed: what they have not shown,
    the script does not do.
    """
    runs = [run for run in (evidence.train, evidence.resume) if run is not None]
    return (
        evidence.train is not None
        and evidence.train.steps() > 0
        and all(run.completed for run in runs)
    )


def begins_elsewhere(train: Run, resumed: Run, after: int) -> str:
    """Why a resumed run has no steps to compare: its first step is that of another optimizer (peers
    that take turns). "" if it has.

    `after`: the steps of `train` that come before it.
    """
    mine = next((set(trace.of(Step)[0].held) for trace in resumed.traces if trace.of(Step)), set())
    theirs = [
        set(r.held)
        for t in train.traces
        for r in t.of(Step)
        if (r.step, r.optimizer) == (after + 1, t.first_optimizer)
    ]
    # Peers that take turns (exam round 2 e_15): a resume that begins with the other optimizer's
    # step has no like step to compare (exam round 2 e_15_mutual_learning; inconclusive since then:
    # round 9 ha_12, round 10 ka_15).
    if not mine or not any(theirs) or mine & set().union(*theirs):
        return ""
    return (
        "the optimizers take turns, and the resumed run begins with another one's step: save after"
        " a whole round (--save-args)"
    )


def never_sharded(evidence: Evidence) -> str:
    """UNSHARDED if the runs completed without a call of fully_shard, else ""."""
    sharded = not went_through(evidence) or evidence.trained.all(Shard)
    return "" if sharded else UNSHARDED


def unseen_load(evidence: Evidence, *setters: str) -> str:
    """Why a rule on loading is inconclusive: the sources can resume and name a setter, and no run
    loaded anything.
    """
    if evidence.saving is None or not went_through(evidence) or unnamed(evidence.sources, *setters):
        return ""
    # The simulated tier never resumes and names its limits itself; a missing load there is no gap
    # of the script (tests of right projects in the simulated tier).
    if evidence.trained.role == "simulate":  # it never resumes; the tier names its limits
        return ""
    traces = [trace for run in trainings(evidence) for trace in run.traces]
    if any(
        t.first(SetState) is not None or any(r.op in LOADS for r in t.of(Checkpoint))
        for t in traces
    ):
        return ""
    lacks = (
        f"the sources can load state ({', '.join(setters)}), but no run did: give --save-args and"
        " --resume-args"
    )
    return evidence.missing.get("resume", Uncovered(lacks, "resume"))


def no_evaluation(evidence: Evidence, reason: str) -> str:
    """Why nothing of an evaluation is judged: not covered, where the sources have one."""
    return reason if unnamed(evidence.sources, "eval") else Uncovered(reason, "evaluation")


def _names(sources: Sources, file: str, words: tuple[str, ...]) -> bool:
    tree = sources.tree(file)
    # A file that does not parse has an empty tree: it may use any name, so no rule is called not
    # applicable by it.
    unreadable = not tree.body and bool(sources.texts.get(file, "").strip())
    return unreadable or not _words(tree).isdisjoint(words)


@lru_cache(maxsize=256)
def _words(tree: ast.Module) -> frozenset[str]:
    """Every name, attribute, keyword and word of a string, except docstrings.

    What is imported is used by its name, or not at all.
    """
    return frozenset(word for node in walk(tree) for word in _words_of(node))


def _words_of(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if (
            isinstance(child, ast.Constant)
            and isinstance(child.value, str)
            and not isinstance(node, ast.Expr)
        ):
            yield from re.findall(r"\w+", child.value)
    if isinstance(node, ast.Import | ast.ImportFrom):
        for alias in node.names:
            # A name that `from x import y` brings in counts only where it is used: an unused import
            # left a right resume inconclusive.
            yield from alias.name.split(".") if alias.asname or isinstance(node, ast.Import) else ()
    name = getattr(node, _NAMES.get(type(node), ""), None)
    yield from [name] if name else ()
