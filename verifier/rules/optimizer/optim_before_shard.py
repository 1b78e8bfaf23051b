import ast

from ...source.events import ITERATE, Event, Flow, covers, exclusive
from ...source.flow_queries import inner
from ...source.values import Value, holders, reach
from ..base import Hits
from ._held import HeldRule


class OptimBeforeShard(HeldRule):
    """The optimizer is built after the last `fully_shard` (and after `to_empty`), so it holds the
    sharded parameters.

    Why: `fully_shard` replaces every parameter by a new DTensor parameter. An optimizer built
    before holds the old tensors: it steps without error, the model never changes, and `zero_grad`
    clears nothing, so gradients accumulate.
    Wrong:
        optimizer = torch.optim.AdamW(model.parameters())
        shard(model)
    Right:
        shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
    Fix: Build the optimizer (and parameter groups and schedulers) after the last `fully_shard`.
    Source: mosaicml/composer PR#3822; huggingface/accelerate PR#4142.
    """

    after_forward, built = False, "before the model was sharded"

    def detect(self, flow: Flow) -> Hits:
        for event, models in flow.optimizers:
            replaced = (_built_before(flow, event, model) for model in models)
            if what := next(filter(None, replaced), ""):
                yield what, event
        for event, models in flow.optimizers:
            replaced = (_listed_before(flow, event, model) for model in models)
            if what := next(filter(None, replaced), ""):
                yield what, event


def _built_before(flow: Flow, event: Event, model: Value) -> str:
    """That an optimizer is built before the sharding of its model, in words; "" if it is not."""
    shards = (e for e, module in flow.shards if model in holders(module))
    later = [e for e in shards if covers(event, e) and not exclusive(event, e)]
    if not later:
        return ""
    shard = later[-1]
    if any(other.index > shard.index and model in of for other, of in flow.optimizers):
        return ""
    # A script that puts the new parameters into param_groups (or passes the optimizer to code that
    # is not followed) repairs it (pairs.yaml optim-before-shard). An optimizer that makes all its
    # steps before the sharding trained a model of its own (a base, a teacher): it holds the right
    # parameters (pairs.yaml, optim-before-shard).
    if _regrouped(flow, event) or _done_before(flow, event, shard):
        return ""
    return f"fully_shard in line {shard.line} replaces the parameters that this optimizer holds"


def _listed_before(flow: Flow, event: Event, model: Value) -> str:
    """That an optimizer is given parameters that were listed before the sharding of their model,
    in words; "" if it is not.
    """
    shard = flow.sharded_by(model, event)
    if shard is None or _regrouped(flow, event):
        return ""
    given = [part for one in event.given() for part in reach(one)]
    taken = _listed(flow, model)
    held = []
    for one in taken:
        parameters = inner(one.args[0].attrs["*"])
        if any(p is q for p in given for q in parameters):
            held.append(one)
    if not held or not all(covers(one, shard) for one in held):
        return ""
    if any(one.index > shard.index for one in taken):
        return ""
    return (
        f"its parameters were listed in line {held[0].line}, before fully_shard in line"
        f" {shard.line} replaced them"
    )


def _listed(flow: Flow, model: Value) -> list[Event]:
    """Where the parameters of a model are iterated over, or made a list."""
    found = []
    for event in [*flow.ops(ITERATE), *flow.ops("builtins.list"), *flow.ops("builtins.sorted")]:
        if not event.args or isinstance(event.node, ast.GeneratorExp):
            continue
        made = event.args[0]
        if made.kind != "made" or made.name not in ("parameters", "named_parameters"):
            continue
        if made.event.on is model and made.attrs.get("*") is not None:
            found.append(event)
    return found


def _done_before(flow: Flow, event: Event, shard: Event) -> bool:
    """Whether the optimizer makes all its steps before `fully_shard`: a training of its own."""
    steps = [e.index for e in flow.methods("step") if e.on is event.result]
    return bool(steps) and max(steps) < shard.index


def _regrouped(flow: Flow, event: Event) -> bool:
    """Whether the parameter groups are replaced, or the optimizer is passed to code that is not
    followed.
    """
    replaced = any(
        "param_groups" in m.source and _stores_groups(m.tree) for m in flow.project.modules
    )
    return replaced or bool(flow.methods("add_param_group")) or flow.escapes(event.result)


def _stores_groups(tree: ast.AST) -> bool:
    """Whether something is assigned to `param_groups`, or to an element or the "params" of one."""
    for target in (
        target for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in node.targets
    ):
        key = target.slice if isinstance(target, ast.Subscript) else None
        other_key = isinstance(key, ast.Constant) and key.value != "params"
        stores = isinstance(target, ast.Attribute | ast.Subscript) and not other_key
        if stores and any(
            isinstance(n, ast.Attribute) and n.attr == "param_groups" for n in ast.walk(target)
        ):
            return True
    return False
