from collections.abc import Iterator

from ...analysis.wording import count, some
from ...evidence import Evidence
from ...finding import Finding, Hit
from ...source.events import STORE, Event, Flow
from ...source.looks import has_parameters, inner, is_known, made_by, parts_of, trains
from ...source.registry import detector
from ...source.values import Value, holders, root_of
from ...trace.events import Shard
from ..base import Rule
from ..raised import stopped_on_plain_weights
from ._late import NOT_USED, gradients_differ, late_parameters


class RootNotWrapped(Rule):
    """Every trainable parameter is managed by FSDP, or its gradient is averaged over the ranks by the script.

    Why: `fully_shard` on the blocks alone leaves the embedding, the last norm and the head as plain tensors. Their
    gradients are never reduced, every rank trains its own copy, and a checkpoint keeps one of them. With plain SGD,
    or `foreach=False`, nothing is raised.
    Wrong:
        for block in model.blocks:
            fully_shard(block)
    Right:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)  # takes every parameter that no block took
    Fix: Call `fully_shard(model)` on the root after the blocks. Do not silence `got mixed torch.Tensor and DTensor`
    with `foreach=False`.
    Source: Tencent-Hunyuan/UniRL PR#7; huggingface/transformers PR#36132; the docstring of `fully_shard` (bottom-up,
    then the root).
    """

    wants = "models"
    simulated = True

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        shards = run.traces[0].of(Shard)
        if not shards:
            return self.unknown(NOT_USED)
        if run.world_size == 1:
            return self.unknown("one rank reduces nothing")
        late = late_parameters(run)  # those have a rule of their own
        plain = [
            n
            for n, e in run.parameters.items()
            if e[0].trainable and not e[0].managed and not e[0].sharded and n not in late
        ]
        if not plain:
            return self.passed(f"{count(len(run.parameters), 'parameter')} managed by FSDP")
        apart = [name for name in plain if gradients_differ(run, name)]
        crashed = stopped_on_plain_weights(run)
        if apart or crashed:
            what = "their gradients are not reduced and differ between ranks" if apart else "the run stopped on them"
            return self.failed(
                f"{some(apart or plain)} are plain tensors: {what}", evidence.line_of(run, Shard, last=True)
            )
        if run.steps() == 0:
            return self.unknown(f"{some(plain)} are plain tensors, and no optimizer step was seen")
        if run.role == "simulate":
            return self.unknown(
                f"{some(plain)} are plain tensors; whether the script reduces them only real ranks show"
            )
        return self.passed(f"{some(plain)} are plain tensors, with the same gradient on every rank")


_BY_HAND = ("all_reduce", "reduce_scatter", "replicate", "DistributedDataParallel")


@detector("root-not-wrapped")
def root_not_wrapped(flow: Flow) -> Iterator[Hit]:
    if not flow.certain or not trains(flow):
        return
    for root in flow.roots.values():
        events = [(e, m) for e, m in flow.shards if root_of(m) is root]
        if not is_known(flow, root) or any(m is root for _, m in events):
            continue
        chosen = {one.name: one for e, m in events if m.kind == "item" for one in _classes_of(e, m)}
        if any(m.kind == "item" and not _classes_of(e, m) for e, m in events) or root.name in chosen:
            continue
        if not flow.forwards(root) or id(root) not in flow.trained or flow.escapes(root) or _reduced_by_hand(flow):
            continue
        managed = {id(m) for _, m in events}
        managed |= {id(part) for _, part in parts_of(root) for one in _elements(part) if one.name in chosen}
        plain = [n for n, part in parts_of(root) if not _inside(part, managed) and has_parameters(flow, part)]
        if plain and not any(e.open for e, _ in events):
            told = f"only parts of the model are sharded; {', '.join(dict.fromkeys(plain))} of {root.name} stay plain tensors"
            yield flow.hit("root-not-wrapped", told, events[-1][0])


def _classes_of(event: Event, module: Value) -> list[Value]:
    """The project classes that a module taken from `modules()` is tested for before it is sharded; none if not certain."""
    for guard in event.guards:
        test = made_by(guard.test, "builtins.isinstance")
        if test is not None and guard.branch and len(test.args) == 2 and test.args[0] is module:
            found = inner(test.args[1])
            return found if all(one.kind == "class" for one in found) else []
    return []


def _elements(part: Value) -> list[Value]:
    """A module, or the modules of a container."""
    container = part.kind == "made" and part.name in ("torch.nn.ModuleList", "torch.nn.Sequential")
    return [one for given in part.event.args for one in inner(given)] if container else [part]


def _inside(part: Value, managed: set[int]) -> bool:
    """Whether a part, or every element of a container, is sharded."""
    if id(part) in managed:
        return True
    if part.kind == "made" and part.name in ("torch.nn.ModuleList", "torch.nn.Sequential", "torch.nn.ModuleDict"):
        elements = [one for given in part.event.args for one in inner(given)]
        return bool(elements) and all(id(one) in managed for one in elements)
    return False


def _reduced_by_hand(flow: Flow) -> bool:
    """Whether gradients are averaged, or parameters frozen, by the script itself."""
    stored = any(e.method in ("requires_grad", "grad") for e in flow.ops(STORE))
    frozen = bool(flow.methods("requires_grad_"))
    on_grads = any(
        part.name == "grad"
        for op in flow.matching(lambda n: n.rpartition(".")[2] in _BY_HAND)
        for a in op.given()
        for part in holders(a)
    )
    return stored or frozen or on_grads
