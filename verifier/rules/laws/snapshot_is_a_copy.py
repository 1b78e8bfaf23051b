import ast
import re

from ...analysis.state import spelled, states
from ...analysis.weight_snapshots import appended, snapshots
from ...source.events import hit_at
from ...source.restored_weights import put_back
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
        named, windows = snapshots(evidence.sources), appended(evidence.sources)
        if backs := evidence.trained.all(PutBack):
            first = backs[0]
            names = some(sorted({back.name for back in backs if back.step == first.step}))
            over = f" (line {first.over.line})" if first.over is not None else ""
            what = (
                f"before step {first.step}: {names} got other values{over}, a model ran with them,"
                " and what is put back"
            )
            return self.failed(f"{what} is their own memory: the other values stay", first.at_line)
        for own in evidence.trained.places(OntoItself)[:1]:
            moved = sorted(
                {one.name for one in evidence.trained.places(OntoItself) if one.step == own.step}
            )
            which = f"{count(len(moved), 'parameter')} ({some(moved)})"
            if own.op == "copy_":
                back = f"before step {own.step} the script puts {which} back from their own memory"
                return self.failed(
                    f"{back}: what it remembered changes with each optimizer step", own.at_line
                )
            what = f"before step {own.step} `{own.op}` averages {which} with themselves"
            fix = (
                "Clone the weights with which the average begins: `p.detach().clone()`. `detach()`"
                " and `.to(dtype)` make no copy."
            )
            return self.failed(
                f"{what}: the average is in their memory, and is always the last weights",
                own.at_line,
                fix=fix,
            )
        for shared in evidence.trained.places(SharedMemory)[:1]:
            what = (
                f"from step {shared.step} on {count(len(shared.names), 'frozen parameter')}"
                f" ({some(shared.names)})"
            )
            follow = (
                "in the memory of trained parameters of another model: each optimizer step changes"
                " them"
            )
            fix = (
                "Copy the values (`copy_`, or `load_state_dict` without `assign=True`), so that"
                " both models have their own memory."
            )
            return self.failed(
                f"{what} {'is' if len(shared.names) == 1 else 'are'} {follow}",
                shared.at_line,
                fix=fix,
            )
        kept: set[str] = set()
        for trace in evidence.trained.traces:
            # a list that is made before training is none of its history
            # A list of live tensors that is made before training (parameter groups, shards to
            # update) is no history; one that gets them while training goes on is (exam round 5
            # p_07_lawa (fault), p_09_partial_window (twin)).
            before = next(iter(states(trace).values()), {})
            for step, values in states(trace).items():
                new = {
                    path
                    for path in values
                    if path not in before and spelled(_variable(path)) & windows
                }
                held = {path for path in values if spelled(_variable(path)) & named}
                held |= {
                    path
                    for path in values
                    # An object that keeps the best holds its weights in an attribute: the holder's
                    # name counts, but not for what it held before training (exam round 9
                    # hb_05_seg_best: missed).
                    if path not in before and spelled(_holder(_variable(path))) & named
                }
                here = sorted(new | held)
                kept.update(here)
                # Only variables that the sources keep for later are snapshots: a state dict that
                # the loop makes, writes and forgets may be live (exam round 5 p_09_partial_window
                # twin).
                if found := [path for path in here if values[path].live]:
                    line = next((r.at_line for r in trace.of(State) if r.step == step), None)
                    tensors = (
                        f"{len(found)} tensors in the memory of the parameters ({some(found)})"
                    )
                    what = f"before step {step}: {_variable(found[0])} holds {tensors}"
                    return self.failed(f"{what}: each optimizer step changes them", line)
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


def _holder(variable: str) -> str:
    """The object of which a variable is an attribute: `Run.best.weights` -> `Run.best`."""
    return variable.rpartition(".")[0]


def _variable(path: str) -> str:
    """What holds a tensor: `main.callbacks[1].best['head.weight']` -> `main.callbacks[1].best`."""
    return re.sub(r"(\[[^\[\]]*\])+$", "", path)
