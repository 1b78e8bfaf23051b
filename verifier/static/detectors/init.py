"""Initial values: seeds that depend on the rank, and memory that nobody writes."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ...finding import Hit
from ..events import CALL, NEW, SHARD, Event, Trace, covers
from ..looks import inner, is_const, is_known, made_by, parts_of, text
from ..values import GLOBAL, Value
from .registry import detector

_SETS_ALL = ("dist.broadcast", "tensor.distribute_tensor", "dist.broadcast_object_list", "dist._broadcast_coalesced")


@detector("rank-dependent-init-no-broadcast")
def rank_dependent_init(trace: Trace) -> Iterator[Hit]:
    if not trace.certain or trace.ops(*_SETS_ALL) or trace.methods("to_empty"):
        return
    seeds = trace.ops("torch.manual_seed", "torch.random.manual_seed")
    for root in trace.roots.values():
        shard, born = trace.first_shard.get(id(root)), root.event
        if shard is None or born is None or not is_known(trace, root) or _on_meta(born):
            continue
        before = [e for e in seeds if e.index < born.index]
        if not before or not before[-1].args or before[-1].args[0].rank != GLOBAL or before[-1].withs:
            continue
        loaded = [e for e in _loads(trace) if e.index > shard.index and not e.guards]
        if (
            not loaded
            and covers(before[-1], born)
            and not trace.escapes(root)
            and not _written(trace, root, born, shard)
        ):
            told = f"{text(before[-1].node)} stands before the model is built: every rank makes other weights and keeps its slice of them"
            yield trace.hit("rank-dependent-init-no-broadcast", told, before[-1])


def _loads(trace: Trace) -> list[Event]:
    names = ("dsd.set_model_state_dict", "dsd.set_state_dict", "dcp.load")
    return [*trace.ops(*names), *trace.methods("load_state_dict")]


def _written(trace: Trace, root: Value, born: Event, shard: Event) -> bool:
    """Whether the weights are written again between construction and sharding."""
    own = ("load_state_dict", "apply", "parameters", "named_parameters", "modules", "named_modules", "state_dict")
    between = trace.events[born.index + 1 : shard.index]
    inits = any(e.op.startswith("torch.nn.init.") and not e.function.endswith("__init__") for e in between)
    return inits or any(e.method in own and e.on is root for e in between)


def _on_meta(event: Event) -> bool:
    """Whether something is made under `torch.device("meta")`, or may be."""
    for context in event.withs:
        device = made_by(context, "torch.device")
        if device is None or not device.args or device.args[0].const == "meta" or device.args[0].kind != "const":
            return True
    return False


def _certainly_meta(event: Event) -> bool:
    devices = [made_by(context, "torch.device") for context in event.withs]
    return any(d is not None and d.args and d.args[0].const == "meta" for d in devices)


@detector("rank0-sd-without-broadcast")
def rank0_without_broadcast(trace: Trace) -> Iterator[Hit]:
    setters = {"dsd.set_model_state_dict": (1, "model_state_dict"), "dsd.set_state_dict": (2, "model_state_dict")}
    for event in trace.ops(*setters):
        state = event.arg(*setters[event.op])
        options = event.kwargs.get("options")
        made = made_by(options, "dsd.StateDictOptions") if options is not None else None
        unclear = event.open or (options is not None and (made is None or made.open))
        if state is None or unclear or event.on_some_ranks or state.kind != "either":
            continue
        if (
            made is not None
            and "broadcast_from_rank0" in made.kwargs
            and not is_const(made.kwargs["broadcast_from_rank0"], False)
        ):
            continue
        read = [p for p in state.parts if p.event is not None and p.kind == "made" and p.event.on_some_ranks]
        rest = [p for p in state.parts if p not in read]
        if (
            read
            and rest
            and all((p.kind == "dict" and not p.parts) or (p.kind == "const" and p.const is None) for p in rest)
        ):
            told = "only some ranks hold the state dict, and broadcast_from_rank0 is not set"
            yield trace.hit("rank0-sd-without-broadcast", told, event)


def _emptied(trace: Trace) -> Iterator[tuple[Event, Value]]:
    """(to_empty, the known model made on meta that it is called on)."""
    for event in trace.methods("to_empty"):
        model = event.on
        if model is not None and is_known(trace, model) and _certainly_meta(model.event) and trace.certain:
            yield event, model


_TOUCHES = (
    "modules",
    "named_modules",
    "buffers",
    "named_buffers",
    "parameters",
    "named_parameters",
    "load_state_dict",
    "children",
)


@detector("meta-params-not-reset")
def meta_params_not_reset(trace: Trace) -> Iterator[Hit]:
    for event, model in _emptied(trace):
        runs = [f for f in trace.forwards(model) if covers(event, f)]
        if not runs:
            continue
        between = trace.events[event.index + 1 : runs[0].index]
        if not any(_may_write(e) for e in between) and not trace.escapes(model, event.index, runs[0].index):
            told = f"{text(event.node)} gives the parameters memory; nothing writes them before the forward in line {runs[0].line}"
            yield trace.hit("meta-params-not-reset", told, event)


def _may_write(event: Event) -> bool:
    """Whether an event may write a parameter; parameters that go straight into an optimizer do not count."""
    plain = event.method in ("parameters", "named_parameters") and not event.loops
    if event.method in _TOUCHES and not plain:
        return True
    named = event.op.startswith(("torch.nn.init.", "dsd.set", "dcp.load", "dist.", "tensor.")) or event.op in (
        NEW,
        CALL,
    )
    return (
        named and event.op not in (SHARD, "dist.get_rank", "dist.get_world_size", "dist.barrier")
    ) or event.method.endswith("_")


@detector("meta-buffers-garbage")
def meta_buffers_garbage(trace: Trace) -> Iterator[Hit]:
    for event, model in _emptied(trace):
        for holder in _modules_in(model):
            for made in trace.methods("register_buffer"):
                if made.on is not holder or not made.args or not isinstance(made.args[0].const, str):
                    continue
                name, persistent = made.args[0].const, made.arg(2, "persistent")
                if is_const(persistent, False) and persistent is not None and not _named_elsewhere(trace, name):
                    told = f"{text(event.node)} gives {holder.name}.{name} memory; no state dict holds it and nothing computes it again"
                    yield trace.hit("meta-buffers-garbage", told, event)
                    return


def _modules_in(model: Value, depth: int = 0) -> Iterator[Value]:
    yield model
    if depth < 6:
        for _, part in parts_of(model):
            elements = (
                [part]
                if part.kind == "object"
                else [e for g in part.event.args for e in inner(g)]
                if part.event
                else []
            )
            for one in elements:
                if one.kind == "object":
                    yield from _modules_in(one, depth + 1)


def _named_elsewhere(trace: Trace, name: str) -> bool:
    """Whether a buffer's name, or all buffers, are spoken of outside of constructors and forwards."""
    words = {name, "buffers", "named_buffers", "_buffers", "__init__", "register_buffer"}
    for module in trace.project.modules:
        for function in ast.walk(module.tree):
            if isinstance(function, ast.FunctionDef | ast.Module) and getattr(function, "name", "") not in (
                "__init__",
                "forward",
            ):
                for node in _own_nodes(function):
                    said = (
                        node.attr
                        if isinstance(node, ast.Attribute)
                        else node.value
                        if isinstance(node, ast.Constant)
                        else ""
                    )
                    if isinstance(said, str) and said in words and not _is_super_init(node):
                        return True
    return False


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of the functions inside it."""
    queue = list(ast.iter_child_nodes(function))
    while queue:
        node = queue.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            queue.extend(ast.iter_child_nodes(node))


def _is_super_init(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "__init__" and isinstance(node.value, ast.Call)
