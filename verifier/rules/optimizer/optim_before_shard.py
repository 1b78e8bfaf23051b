import ast
from collections.abc import Iterator

from ...evidence import Evidence
from ...finding import Finding, Hit
from ...source.events import ITERATE, Event, Flow, covers, exclusive
from ...source.looks import inner, names_in
from ...source.registry import detector
from ...source.values import Value, holders, reach
from ..base import Rule
from ._held import judge_held


class OptimBeforeShard(Rule):
    """The optimizer is built after the last `fully_shard` (and after `to_empty`), so it holds the sharded parameters.

    Why: `fully_shard` replaces every parameter by a new DTensor parameter. An optimizer built before holds the old
    tensors: it steps without error, the model never changes, and `zero_grad` clears nothing, so gradients pile up.
    Wrong:
        optimizer = torch.optim.AdamW(model.parameters())
        shard(model)
    Right:
        shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
    Fix: Move the construction of the optimizer (and of parameter groups and schedulers) below the last
    `fully_shard`.
    Source: mosaicml/composer PR#3822; huggingface/accelerate PR#4142.
    """

    def judge(self, evidence: Evidence) -> Finding:
        return judge_held(self, evidence, after_forward=False)


@detector("optim-before-shard")
def optim_before_shard(flow: Flow) -> Iterator[Hit]:
    for event, models in flow.optimizers:
        for model in models:
            later = [e for e, m in flow.shards if model in holders(m) and covers(event, e) and not exclusive(event, e)]
            again = [o for o, ms in flow.optimizers if o.index > (later[-1].index if later else 0) and model in ms]
            if not later or again or _regrouped(flow, event):
                continue
            told = f"the optimizer is built in line {event.line}, before fully_shard replaces the parameters in line {later[-1].line}"
            yield flow.hit("optim-before-shard", told, event)
            break


@detector("optim-before-shard")
def groups_before_shard(flow: Flow) -> Iterator[Hit]:
    """Parameters put into lists before the sharding, and given to an optimizer after it."""
    for event, models in flow.optimizers:
        for model in models:
            shard = flow.sharded_by(model, event)
            if shard is None or _regrouped(flow, event):
                continue
            given = [part for one in event.given() for part in reach(one)]
            taken = [e for e in _taken(flow, model) if e.args[0].attrs.get("*") is not None]
            held = [e for e in taken if any(p is q for p in given for q in inner(e.args[0].attrs["*"]))]
            if held and all(covers(e, shard) for e in held) and not any(e.index > shard.index for e in taken):
                told = f"its parameters were listed in line {held[0].line}, before fully_shard replaced them in line {shard.line}"
                yield flow.hit("optim-before-shard", told, event)
                break


def _taken(flow: Flow, model: Value) -> list[Event]:
    """Where the parameters of a model are gone through at once; a generator waits."""
    found = [*flow.ops(ITERATE), *flow.ops("builtins.list"), *flow.ops("builtins.sorted")]
    kinds = ("parameters", "named_parameters")
    return [
        e
        for e in found
        if e.args
        and e.args[0].kind == "made"
        and e.args[0].name in kinds
        and e.args[0].event.on is model
        and not isinstance(e.node, ast.GeneratorExp)
    ]


def _regrouped(flow: Flow, event: Event) -> bool:
    """Whether the parameter groups are written again, or the optimizer is handed to code that is not followed."""
    made = event.result
    groups = names_in(flow, "param_groups") and any(
        node.attr == "param_groups" for m in flow.project.modules for node in _stored_attributes(m.tree)
    )
    return groups or bool(flow.methods("add_param_group")) or flow.escapes(made)


def _stored_attributes(tree: ast.AST) -> Iterator[ast.Attribute]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                inside = [n for n in ast.walk(target) if isinstance(n, ast.Attribute)]
                plain = isinstance(target, ast.Subscript) and not (
                    isinstance(target.slice, ast.Constant) and target.slice.value != "params"
                )
                yield from inside if plain or isinstance(target, ast.Attribute) else ()
