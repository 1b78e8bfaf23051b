"""Which parameters the optimizer holds, and what it does with them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ...finding import Hit
from ..events import ITERATE, NEW, Event, Trace, covers, exclusive, hit_at
from ..looks import inner, is_const, names_in, text
from ..project import Module
from ..values import Value, const, holders, reach
from .registry import detector


@detector("optim-before-shard")
def optim_before_shard(trace: Trace) -> Iterator[Hit]:
    for event, models in trace.optimizers:
        for model in models:
            later = [e for e, m in trace.shards if model in holders(m) and covers(event, e) and not exclusive(event, e)]
            again = [o for o, ms in trace.optimizers if o.index > (later[-1].index if later else 0) and model in ms]
            if not later or again or _regrouped(trace, event):
                continue
            told = f"the optimizer is built in line {event.line}, before fully_shard replaces the parameters in line {later[-1].line}"
            yield trace.hit("optim-before-shard", told, event)
            break


@detector("optim-before-shard")
def groups_before_shard(trace: Trace) -> Iterator[Hit]:
    """Parameters put into lists before the sharding, and given to an optimizer after it."""
    for event, models in trace.optimizers:
        for model in models:
            shard = trace.sharded_by(model, event)
            if shard is None or _regrouped(trace, event):
                continue
            given = [part for one in event.given() for part in reach(one)]
            taken = [e for e in _taken(trace, model) if e.args[0].attrs.get("*") is not None]
            held = [e for e in taken if any(p is q for p in given for q in inner(e.args[0].attrs["*"]))]
            if held and all(covers(e, shard) for e in held) and not any(e.index > shard.index for e in taken):
                told = f"its parameters were listed in line {held[0].line}, before fully_shard replaced them in line {shard.line}"
                yield trace.hit("optim-before-shard", told, event)
                break


def _taken(trace: Trace, model: Value) -> list[Event]:
    """Where the parameters of a model are gone through at once; a generator waits."""
    found = [*trace.ops(ITERATE), *trace.ops("builtins.list"), *trace.ops("builtins.sorted")]
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


def _regrouped(trace: Trace, event: Event) -> bool:
    """Whether the parameter groups are written again, or the optimizer is handed to code that is not followed."""
    made = event.result
    groups = names_in(trace, "param_groups") and any(
        node.attr == "param_groups" for m in trace.project.modules for node in _stored_attributes(m.tree)
    )
    return groups or bool(trace.methods("add_param_group")) or trace.escapes(made)


def _stored_attributes(tree: ast.AST) -> Iterator[ast.Attribute]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                inside = [n for n in ast.walk(target) if isinstance(n, ast.Attribute)]
                plain = isinstance(target, ast.Subscript) and not (
                    isinstance(target.slice, ast.Constant) and target.slice.value != "params"
                )
                yield from inside if plain or isinstance(target, ast.Attribute) else ()


@detector("optim-built-after-forward")
def optim_built_after_forward(trace: Trace) -> Iterator[Hit]:
    for event, models in trace.optimizers:
        for model in models:
            shard = trace.sharded_by(model, event)
            if (
                shard is None
                or shard.open
                or not is_const(shard.kwargs.get("reshard_after_forward", const(None)), None)
            ):
                continue
            ran = [f for f in trace.forwards(model) if covers(shard, f) and covers(f, event)]
            if not ran or not _params_taken_late(trace, event, ran[-1]):
                continue
            between = trace.events[ran[0].index : event.index]
            if not any(e.method in ("backward", "reshard", "state_dict") or e.op.startswith("dsd.") for e in between):
                ran_at = f"{text(ran[0].node)} in line {ran[0].line}"
                told = f"{ran_at} left the root unsharded; the optimizer built here is given its temporary tensors"
                yield trace.hit("optim-built-after-forward", told, event)
                break


def _params_taken_late(trace: Trace, event: Event, forward: Event) -> bool:
    """Whether no `parameters()` was taken before the forward."""
    taken = trace.methods("parameters", "named_parameters")
    return not any(e.index < forward.index for e in taken)


_MATRIX = ("svd", "qr", "inverse", "eigh", "matrix_norm", "mm", "matmul", "bmm", "addmm")
_GATHERS = (
    "full_tensor",
    "redistribute",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "all_reduce",
    "distribute_tensor",
)


@detector("matrix-optimizer-on-local-shard")
def matrix_optimizer_on_local_shard(trace: Trace) -> Iterator[Hit]:
    """A `step` of the project's own optimizer that multiplies local shards as if they were whole matrices."""
    done = set()
    for event in trace.ops(NEW):
        info = event.result.cls
        if info is None or info.name in done or not any(event is e for e, _ in trace.optimizers):
            continue
        done.add(info.name)
        names = {n for m in info.methods.values() for n in _words(m)}
        helpers = [f for f in ast.walk(info.home.tree) if isinstance(f, ast.FunctionDef) and f.name in names]
        bodies = [*info.methods.values(), *helpers]
        words = {word for body in bodies for word in _words(body)}
        multiplies = words & set(_MATRIX) or any(isinstance(n, ast.MatMult) for b in bodies for n in ast.walk(b))
        local = next(
            (n for b in bodies for n in ast.walk(b) if isinstance(n, ast.Attribute) and n.attr in _LOCAL), None
        )
        if multiplies and local is not None and not words & set(_GATHERS):
            yield _hit(info.home, local, info.name)


_LOCAL = ("to_local", "_local_tensor")


def _words(node: ast.AST) -> set[str]:
    """Every name and attribute in a piece of code."""
    return {
        n.id if isinstance(n, ast.Name) else n.attr for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute)
    }


def _hit(module: Module, node: ast.Attribute, name: str) -> Hit:
    told = f"{name} multiplies matrices that are one rank's shard: {text(node)}"
    return hit_at("matrix-optimizer-on-local-shard", told, module, node.lineno, f"{name}.step")
