from collections.abc import Collection

from ...analysis.unusual_parallelism import PARTS_OR_COPIES, divided_by_script, parts_or_copies
from ...source.events import STORE, Event, Flow
from ...source.flow_queries import has_parameters, inner, is_known, made_by, parts_of, trains
from ...source.values import Value, holders, root_of
from ...trace.events import Shard
from ..base import Evidence, Finding, Hits, Rule, count, some
from ..raised import stopped_on_plain_weights
from ._base import NO_STEP, NOT_USED, ONE_RANK, elements, gradients_differ, late_parameters


class RootNotWrapped(Rule):
    """Every trainable parameter is managed by FSDP, or the script averages its gradient over the
    ranks.

    Why: `fully_shard` on the blocks alone leaves embedding, last norm and head as plain tensors.
    Their gradients are never reduced, ranks train copies of which a checkpoint keeps one, and with
    plain SGD or `foreach=False` nothing is raised.
    Wrong:
        for block in model.blocks:
            fully_shard(block)
    Right:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)  # groups the remaining parameters
    Fix: Call `fully_shard(model)` on the root after the blocks. `foreach=False` only hides the
    mixed-tensor error.
    Source: Tencent-Hunyuan/UniRL PR#7; huggingface/transformers PR#36132; the docstring of
    `fully_shard`.
    """

    wants = "models"
    simulated = True
    reads = frozenset({"single"})

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        shards = run.traces[0].of(Shard)
        if not shards:
            return self.unknown(NOT_USED)
        if run.world_size == 1:
            return self.unknown(ONE_RANK)
        # Parameters registered after the sharding are params-added-after-shard's (fault
        # params_added_after_shard*.yaml). Those of which the script gives each rank a part are
        # plain on purpose, with other gradients on each rank (exam round 6 w_14_rowparallel_table).
        others = {*late_parameters(run), *divided_by_script(evidence)}
        first = {name: entries[0] for name, entries in run.parameters.items() if name not in others}
        plain = [n for n, e in first.items() if e.trainable and not e.managed and not e.sharded]
        if not plain:
            return self.passed(
                f"{count(len(run.parameters) - len(others), 'parameter')} managed by FSDP"
            )
        line = run.line_of(Shard, last=True)
        # Plain parameters whose gradients the script reduces itself are equal on all ranks at the
        # step: right (zoo/ignored_params.py, exam round 1 c_16_replicated_small_params).
        if apart := [name for name in plain if gradients_differ(run, name)]:
            if {*apart} <= parts_or_copies(evidence):
                return self.unknown(f"{some(apart)} are plain tensors: {PARTS_OR_COPIES}")
            what = "plain tensors whose gradients are not reduced and differ between ranks"
            return self.failed(f"{some(apart)} are {what}", line)
        what = f"{some(plain)} are plain tensors"
        if stopped_on_plain_weights(run):
            stopped = f"{what}: the run stopped on them"
            return self.failed(stopped, line, explains=("run-completes",))
        if run.steps() == 0:
            return self.unknown(f"{what}, and {NO_STEP}")
        if run.role == "simulate":
            return self.unknown(
                f"{what}; only a run on real ranks shows whether the script reduces their gradients"
            )
        return self.passed(f"{what}, with the same gradient on every rank")

    def detect(self, flow: Flow) -> Hits:
        if not flow.certain or not trains(flow) or _script_reduces(flow):
            return
        for root in flow.roots.values():
            events = [(e, m) for e, m in flow.shards if root_of(m) is root]
            classes = [_classes_of(e, m) for e, m in events if m.kind == "item"]
            chosen = {one.name for own in classes for one in own}
            # Whether the calls may shard more than is seen.
            known = is_known(flow, root) and all(classes) and not any(e.open for e, _ in events)
            whole = root.name in chosen or any(m is root for _, m in events)
            trained = flow.forwards(root) and id(root) in flow.trained and not flow.escapes(root)
            if not known or whole or not trained:
                continue
            managed = {id(m) for _, m in events}
            if plain := _plain_parts(flow, root, managed, chosen):
                yield (
                    f"only parts of the model are sharded: {', '.join(plain)} of {root.name} stay"
                    " plain tensors",
                    events[-1][0],
                )


# Names of calls by which a script reduces gradients itself (zoo/ignored_params.py).
_REDUCE = ("all_reduce", "reduce_scatter", "replicate", "DistributedDataParallel")
_CONTAINERS = ("torch.nn.ModuleList", "torch.nn.Sequential")


def _plain_parts(flow: Flow, root: Value, managed: set[int], chosen: set[str]) -> Collection[str]:
    """The names of the parts with parameters that are neither `managed` modules nor of the `chosen`
    classes.
    """
    parts = list(parts_of(root))
    managed = managed | {
        id(part) for _, part in parts if any(one.name in chosen for one in _modules(part))
    }
    names = (
        name for name, part in parts if not _inside(part, managed) and has_parameters(flow, part)
    )
    return dict.fromkeys(names)


def _classes_of(event: Event, module: Value) -> list[Value]:
    """The project classes for which an item of `modules()` is tested before it is sharded; none if
    not certain.
    """
    for guard in event.guards:
        test = made_by(guard.test, "builtins.isinstance")
        if test is not None and guard.branch and len(test.args) == 2 and test.args[0] is module:
            found = inner(test.args[1])
            return found if all(one.kind == "class" for one in found) else []
    return []


def _modules(part: Value) -> list[Value]:
    """A module, or the modules of a container."""
    return elements(part) if part.kind == "made" and part.name in _CONTAINERS else [part]


def _inside(part: Value, managed: set[int]) -> bool:
    """Whether a part, or every element of a container, is sharded."""
    if id(part) in managed:
        return True
    container = part.kind == "made" and part.name in (*_CONTAINERS, "torch.nn.ModuleDict")
    inside = {id(one) for one in elements(part)} if container else set()
    return bool(inside) and inside <= managed


def _script_reduces(flow: Flow) -> bool:
    """Whether the script itself averages gradients or freezes parameters."""
    stored = any(e.method in ("requires_grad", "grad") for e in flow.ops(STORE))
    calls = flow.matching(lambda name: name.rpartition(".")[2] in _REDUCE)
    parts = (part for call in calls for given in call.given() for part in holders(given))
    return (
        stored or bool(flow.methods("requires_grad_")) or any(part.name == "grad" for part in parts)
    )
