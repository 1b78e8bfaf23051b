import ast
import re
from collections.abc import Callable, Iterator

from ...analysis.state import spelled, states
from ...analysis.weight_snapshots import appended, snapshots
from ...source.events import hit_at
from ...source.restored_weights import put_back
from ...trace import Trace
from ...trace.events import OntoItself, PutBack, SharedMemory, State
from ..base import Evidence, Finding, Flow, Hits, Rule, count, some


class SnapshotIsACopy(Rule):
    """A snapshot of the weights that the loop keeps, such as the best ones so far, is a copy.

    Why: `state_dict()`, `detach()` and `to_local()` give tensors in the memory of the parameters.
    The next optimizer step changes the "best weights", and what is exported in the end are the last
    ones. Nothing shows it: the logged number is that of the best step. Weights that are remembered
    so, overwritten for an evaluation (an average) and put back, keep the average: training goes on
    from it. Weights from which several trainings are to begin, put back so, are those of the last
    one. A target network that `load_state_dict(..., assign=True)` updates is in the memory of the
    trained one, and never lags.
    Wrong:
        loss = evaluate(model)
        if loss < best_loss:
            best_loss, best = loss, model.state_dict()
    Right:
        loss = evaluate(model)
        if loss < best_loss:
            best_loss = loss
            best = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Fix: Clone each tensor (`tensor.detach().clone()`), or `copy.deepcopy` the state dict.
    Source: law L4: at each step the probe looks whether tensors that the loop holds share memory
    with a parameter; those that the sources assign under a comparison and read elsewhere, assign
    before a step and read after it, or append to a window while training goes on, are snapshots.
    Frozen parameters of a model that is called are compared with trained ones.
    """

    in_windows = True

    def applies(self, evidence: Evidence) -> str:
        if evidence.train is not None and any(
            map(evidence.train.all, (OntoItself, PutBack, SharedMemory))
        ):
            return ""
        nothing = (
            "the sources keep nothing under a comparison, or over a step, that they read afterwards"
        )
        return "" if snapshots(evidence.sources) | appended(evidence.sources) else nothing

    def judge(self, evidence: Evidence) -> Finding:
        found = (case(self, evidence) for case in CASES)
        return next(filter(None, found), None) or self._nothing_wrong(evidence)

    def _nothing_wrong(self, evidence: Evidence) -> Finding:
        kept: set[str] = set()
        for _, _, paths in _kept(evidence):
            kept.update(paths)
        if not any("[" in path for path in kept):
            return self.not_applicable("no snapshot of weights was kept in the steps that were run")
        return self.passed(
            f"{len(kept)} values that are kept while training goes on are no live weights"
        )

    def detect(self, flow: Flow) -> Hits:
        """What a function puts back into the parameters is their own memory, which it has
        overwritten.
        """
        # Installed packages are not the user's to fix, and keep views on purpose (libraries' own
        # code).
        for module in (one for one in flow.project.modules if not one.installed):
            for function, kept in put_back(module):
                what = (
                    f"`{ast.unparse(kept)}` keeps no copy: after the parameters are overwritten,"
                    " putting it back changes nothing"
                )
                yield what, hit_at("", "", module, kept.lineno, function.name).location


def _put_back(rule: Rule, evidence: Evidence) -> Finding | None:
    """What is put back after an evaluation with other values is the parameters' own memory."""
    backs = evidence.trained.all(PutBack)
    if not backs:
        return None
    first = backs[0]
    names = some(sorted({back.name for back in backs if back.step == first.step}))
    over = f" (line {first.over.line})" if first.over is not None else ""
    what = (
        f"before step {first.step}: {names} got other values{over}, a model ran with them,"
        " and what is put back"
    )
    return rule.failed(f"{what} is their own memory: the other values stay", first.at_line)


def _onto_itself(rule: Rule, evidence: Evidence) -> Finding | None:
    """Parameters are copied from, or averaged with, their own memory."""
    records = evidence.trained.places(OntoItself)
    if not records:
        return None
    own = records[0]
    moved = sorted({one.name for one in records if one.step == own.step})
    which = f"{count(len(moved), 'parameter')} ({some(moved)})"
    if own.op == "copy_":
        back = f"before step {own.step} the script puts {which} back from their own memory"
        return rule.failed(
            f"{back}: what it remembered changes with each optimizer step", own.at_line
        )
    what = f"before step {own.step} `{own.op}` averages {which} with themselves"
    text = f"{what}: the average is in their memory, and is always the last weights"
    fix = (
        "Clone the weights with which the average begins: `p.detach().clone()`. `detach()`"
        " and `.to(dtype)` make no copy."
    )
    return rule.failed(text, own.at_line, fix=fix)


def _shared(rule: Rule, evidence: Evidence) -> Finding | None:
    """Frozen parameters of one model are in the memory of another's trained ones."""
    records = evidence.trained.places(SharedMemory)
    if not records:
        return None
    shared = records[0]
    frozen = f"{count(len(shared.names), 'frozen parameter')} ({some(shared.names)})"
    text = (
        f"from step {shared.step} on {frozen} {'is' if len(shared.names) == 1 else 'are'} in the"
        " memory of trained parameters of another model: each optimizer step changes them"
    )
    fix = (
        "Copy the values (`copy_`, or `load_state_dict` without `assign=True`), so that"
        " both models have their own memory."
    )
    return rule.failed(text, shared.at_line, fix=fix)


def _live(rule: Rule, evidence: Evidence) -> Finding | None:
    """A snapshot is in the memory of the parameters."""
    for trace, step, paths in _kept(evidence):
        values = states(trace)[step]
        if found := [path for path in paths if values[path].live]:
            line = next((r.at_line for r in trace.of(State) if r.step == step), None)
            tensors = f"{len(found)} tensors in the memory of the parameters ({some(found)})"
            what = f"before step {step}: {_variable(found[0])} holds {tensors}"
            return rule.failed(f"{what}: each optimizer step changes them", line)
    return None


# In this order: what was seen to go wrong comes before what will.
CASES: tuple[Callable[[Rule, Evidence], Finding | None], ...] = (
    _put_back,
    _onto_itself,
    _shared,
    _live,
)


def _kept(evidence: Evidence) -> Iterator[tuple[Trace, int, list[str]]]:
    """(trace, step, paths of what is held before it that the sources keep for later).

    Only these are snapshots: a state dict that the loop makes, writes and forgets may be live (exam
    round 5 p_09_partial_window twin).
    """
    named, windows = snapshots(evidence.sources), appended(evidence.sources)
    for trace in evidence.trained.traces:
        # A list of live tensors that is made before training (parameter groups, shards to update)
        # is no history; one that gets them while training goes on is (exam round 5 p_07_lawa
        # (fault), p_09_partial_window (twin)).
        before = next(iter(states(trace).values()), {})
        for step, values in states(trace).items():
            held = {path for path in values if spelled(_variable(path)) & named}
            for path in values.keys() - before.keys():
                # An object that keeps the best holds its weights in an attribute: the holder's name
                # counts, but not for what it held before training (exam round 9 hb_05_seg_best:
                # missed).
                variable = _variable(path)
                if spelled(variable) & windows or spelled(_holder(variable)) & named:
                    held.add(path)
            yield trace, step, sorted(held)


def _holder(variable: str) -> str:
    """The object of which a variable is an attribute: `Run.best.weights` -> `Run.best`."""
    return variable.rpartition(".")[0]


def _variable(path: str) -> str:
    """What holds a tensor: `main.callbacks[1].best['head.weight']` -> `main.callbacks[1].best`."""
    return re.sub(r"(\[[^\[\]]*\])+$", "", path)
