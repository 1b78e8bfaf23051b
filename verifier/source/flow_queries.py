"""Queries on values and events that several detectors use."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from typing import cast

from .coverage import shortened
from .events import Event, Flow, Guard
from .project import Module
from .values import Value, choices, holders, reach

LOW_DTYPES = ("torch.bfloat16", "torch.float16", "torch.half")
FULL = ("torch.float32", "torch.float", "torch.float64", "torch.double")
_WITH_PARAMETERS = (
    *(
        "Linear",
        "Bilinear",
        "Embedding",
        "EmbeddingBag",
        "LayerNorm",
        "RMSNorm",
        "GroupNorm",
        "MultiheadAttention",
    ),
    *(
        "LSTM",
        "GRU",
        "RNN",
        "Parameter",
        "PReLU",
        "Transformer",
        "TransformerEncoder",
        "TransformerDecoder",
    ),
    *("TransformerEncoderLayer", "TransformerDecoderLayer"),
)
GETTERS = ("dsd.get_model_state_dict", "dsd.get_state_dict", "dsd.get_optimizer_state_dict")
SETTERS = ("dsd.set_model_state_dict", "dsd.set_state_dict", "dsd.set_optimizer_state_dict")
SAVES = ("dcp.save", "dcp.async_save")
LOCAL = ("to_local", "_local_tensor")
SAMPLER = "data.DistributedSampler"
POLICY = "fsdp.MixedPrecisionPolicy"
_CASTS = {"bfloat16": True, "half": True, "float": False, "double": False}


def text(node: ast.AST, limit: int = 70) -> str:
    """The source of a node, shortened to `limit` characters."""
    return shortened(node, limit) or "it"


def first_text(event: Event) -> str:
    """The source of a call's first argument, or of what a method is called on."""
    node = event.node
    if isinstance(node, ast.Call) and not event.op and isinstance(node.func, ast.Attribute):
        return text(node.func.value)
    return text(node.args[0]) if isinstance(node, ast.Call) and node.args else text(node)


def is_dtype(value: Value | None, names: tuple[str, ...]) -> bool:
    """Whether a value is one of these dtypes, whatever branch is taken."""
    return value is not None and all(
        one.kind == "name" and one.name in names for one in choices(value)
    )


def is_const(value: Value | None, wanted: object) -> bool:
    """Whether a value is this constant, whatever branch is taken."""
    return value is not None and all(
        one.kind == "const" and one.const is wanted for one in choices(value)
    )


def made_by(value: Value | None, *names: str) -> Event | None:
    """The call of one of these external functions that made a value; None if it may be something
    else.
    """
    if value is None or value.kind != "made" or value.name not in names:
        return None
    return cast(Event, value.event)


def goes_through(value: Value, *methods: str) -> bool:
    """Whether one of these functions or methods was called on the way to a value."""
    return any(
        part.kind == "made" and part.name.rpartition(".")[2] in methods for part in reach(value)
    )


def shared(value: Value) -> bool:
    """Whether a collective has made a value, or what it is computed from, the same on all ranks."""
    gathers = (
        "full_tensor",
        "redistribute",
        "all_gather_object",
        "all_gather",
        "gather",
        "all_reduce",
        "broadcast",
    )
    return any(part.synced for part in reach(value)) or goes_through(value, *gathers)


def parts_of(module: Value) -> Iterator[tuple[str, Value]]:
    """(name, module or parameter) of what a module was seen to hold."""
    known = (
        (name, value)
        for name, value in module.attrs.items()
        if not name.startswith("[") and name != "*"
    )
    return (
        (name, one)
        for name, value in known
        for one in choices(value)
        if one.kind in ("made", "object")
    )


def has_parameters(flow: Flow, value: Value, depth: int = 0) -> bool:
    """Whether a module is known to hold parameters."""
    if depth > 8:
        return False
    if value.kind == "made":
        last = value.name.rpartition(".")[2]
        if value.name.startswith("torch.nn.") and (
            last in _WITH_PARAMETERS or last.startswith(("Conv", "BatchNorm"))
        ):
            return True
        if last in ("ModuleList", "Sequential", "ModuleDict"):
            inside = [one for given in value.event.args for one in inner(given)]
            return any(has_parameters(flow, one, depth + 1) for one in inside)
        return False
    if value.kind == "object" and flow.is_module(value):
        return any(has_parameters(flow, one, depth + 1) for _, one in parts_of(value))
    return False


def inner(value: Value) -> list[Value]:
    """The elements of a display, or the value itself."""
    parts = value.parts if value.kind in ("list", "tuple", "dict") else [value]
    return [one for part in parts for one in choices(part)]


def is_known(flow: Flow, value: Value) -> bool:
    """Whether a model is a class of the project, whose parts were seen when it was made."""
    return value.kind == "object" and value.event is not None and flow.is_module(value)


def steps_of(flow: Flow) -> list[Event]:
    """The calls of `step` on an optimizer."""
    made = {id(event.result) for event, _ in flow.optimizers}
    return [
        e
        for e in flow.methods("step")
        if e.on is not None and any(id(one) in made for one in choices(e.on))
    ]


def trains(flow: Flow) -> bool:
    """Whether the entry goes backward and steps."""
    return bool(flow.methods("backward")) and bool(flow.methods("step"))


def names_in(flow: Flow, *wanted: str) -> bool:
    """Whether one of these words stands in a source of the project (a coarse check, to rule
    something out).
    """
    return any(_says(module, word) for module in flow.project.modules for word in wanted)


@lru_cache(maxsize=65536)
def _says(module: Module, word: str) -> bool:
    """Whether a word stands in a file. Many flows of a project share their files."""
    return word in module.source


def identifiers(flow: Flow) -> set[str]:
    """Every name and attribute in the sources of the project."""
    nodes = (node for module in flow.project.modules for node in ast.walk(module.tree))
    found = (
        getattr(node, "id", "") or getattr(node, "attr", "") or getattr(node, "name", "")
        for node in nodes
    )
    return {word for word in found if isinstance(word, str)}


def options_of(event: Event) -> Event | None:
    return made_by(event.kwargs.get("options"), "dsd.StateDictOptions")


def has_option(options: Event | None, name: str) -> bool:
    """Whether an option is surely on."""
    return options is not None and is_const(options.kwargs.get(name), True)


def state_given(event: Event) -> Value | None:
    return event.arg(0, "state_dict")


def gradient(flow: Flow, value: Value, event: Event) -> bool:
    """Whether a value is computed from the `.grad` of a parameter of a sharded model."""
    for part in reach(value):
        if part.kind == "attr" and part.name == "grad" and part.owner is not None:
            owner = part.owner
            holder = owner.owner if owner.kind == "item" and owner.name == "parameter" else None
            if holder is not None and flow.sharded_by(holder, event) is not None:
                return True
    return False


def names(value: Value) -> set[str]:
    return {part.name.rpartition(".")[2] for part in reach(value)}


def process_groups(flow: Flow) -> list[Event]:
    return flow.ops("dist.init_process_group")


def is_nccl(event: Event) -> bool:
    """Whether a process group is made with NCCL alone, whatever branch is taken."""
    backend = event.arg(0, "backend")
    return backend is not None and all(
        one.kind == "const" and one.const == "nccl" for one in choices(backend)
    )


def never_on(flow: Flow, method: str, what: str) -> Iterator[tuple[str, Event]]:
    """A switch that every call in the project turns off: a message that ends in `what`, and the
    first call.
    """
    if not trains(flow):
        return
    calls = flow.methods(method)
    off = [e for e in calls if is_const(e.arg(0, ""), False) and not e.kwargs and e.on is not None]
    if not off or len(off) < len(calls):
        return
    elsewhere = sum(_mentions(m.tree, method) for m in flow.project.modules if method in m.source)
    if elsewhere == len({id(e.node) for e in off}):
        yield (
            f"{text(off[0].node)} is never followed by a call that turns it on again: {what}",
            off[0],
        )


def _mentions(tree: ast.AST, name: str) -> int:
    """How often a name or a text stands in a source."""
    return sum(
        name in (getattr(node, "attr", None), getattr(node, "value", None))
        for node in ast.walk(tree)
    )


def said(guard: Guard) -> str:
    test = text(getattr(guard.node, "test", guard.node), 40)
    return f"`{test}`" if guard.branch else f"`not ({test})`"


def _certainly_meta(event: Event) -> bool:
    devices = [made_by(context, "torch.device") for context in event.withs]
    return any(d is not None and d.args and d.args[0].const == "meta" for d in devices)


def emptied(flow: Flow) -> Iterator[tuple[Event, Value]]:
    """(to_empty, the known model made on meta that it is called on)."""
    for event in flow.methods("to_empty"):
        model = event.on
        if (
            model is not None
            and is_known(flow, model)
            and _certainly_meta(model.event)
            and flow.certain
        ):
            yield event, model


def cast_of(event: Event) -> bool | None:
    """Whether a method call casts to low (True) or full (False) precision; None if it does not
    cast, or it is not known.
    """
    if event.method in _CASTS and not event.args:
        return _CASTS[event.method]
    if event.method == "to":
        for value in event.given():
            if is_dtype(value, LOW_DTYPES) or is_dtype(value, FULL):
                return is_dtype(value, LOW_DTYPES)
    return None


def policies_of_trained(flow: Flow) -> list[Value]:
    """The policies with which models that an optimizer holds are sharded."""
    pairs = [(v, m) for e, m in flow.shards if (v := e.kwargs.get("mp_policy")) is not None]
    return [
        policy for policy, module in pairs if any(id(h) in flow.trained for h in holders(module))
    ]
