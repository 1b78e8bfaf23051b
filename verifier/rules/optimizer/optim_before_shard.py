import ast

from ...source.events import ITERATE, Event, Flow, covers, exclusive
from ...source.flow_queries import inner
from ...source.values import holders, reach
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
            for model in models:
                shards = (e for e, module in flow.shards if model in holders(module))
                later = [e for e in shards if covers(event, e) and not exclusive(event, e)]
                again = [
                    o
                    for o, ms in flow.optimizers
                    if o.index > (later[-1].index if later else 0) and model in ms
                ]
                if (
                    later
                    and not again
                    # A script that puts the new parameters into param_groups (or passes the
                    # optimizer to code that is not followed) repairs it (pairs.yaml
                    # optim-before-shard).
                    and not _regrouped(flow, event)
                    # An optimizer that makes all its steps before the sharding trained a model of
                    # its own (a base, a teacher): it holds the right parameters (pairs.yaml,
                    # optim-before-shard).
                    and not _done_before(flow, event, later[-1])
                ):
                    what = (
                        f"fully_shard in line {later[-1].line} replaces the parameters that this"
                        " optimizer holds"
                    )
                    yield what, event
                    break
        # parameters listed before the sharding and passed to an optimizer after it
        eager = [*flow.ops(ITERATE), *flow.ops("builtins.list"), *flow.ops("builtins.sorted")]
        made = [
            e
            for e in eager
            if e.args and e.args[0].kind == "made" and not isinstance(e.node, ast.GeneratorExp)
        ]
        iterations = [e for e in made if e.args[0].name in ("parameters", "named_parameters")]
        for event, models in flow.optimizers:
            for model in models:
                shard = flow.sharded_by(model, event)
                if shard is None or _regrouped(flow, event):
                    continue
                given = [part for one in event.given() for part in reach(one)]
                taken = [
                    e
                    for e in iterations
                    if e.args[0].event.on is model and e.args[0].attrs.get("*") is not None
                ]
                held = [
                    e
                    for e in taken
                    if any(p is q for p in given for q in inner(e.args[0].attrs["*"]))
                ]
                if (
                    held
                    and all(covers(e, shard) for e in held)
                    and not any(e.index > shard.index for e in taken)
                ):
                    what = (
                        f"its parameters were listed in line {held[0].line}, before fully_shard in"
                        f" line {shard.line}"
                    )
                    yield f"{what} replaced them", event
                    break


def _done_before(flow: Flow, event: Event, shard: Event) -> bool:
    """Whether the optimizer makes its steps before `fully_shard`, and none behind it: a training of
    its own.
    """
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
