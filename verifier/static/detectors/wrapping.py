"""What `fully_shard` is applied to, and what is done to a model afterwards."""

from __future__ import annotations

from collections.abc import Iterator

from ...finding import Hit
from ..events import CALL, STORE, Event, Trace, covers
from ..looks import has_parameters, inner, is_const, is_known, made_by, parts_of, text, trains
from ..values import Value, choices, holders, root_of
from .registry import detector

_BY_HAND = ("all_reduce", "reduce_scatter", "replicate", "DistributedDataParallel")


@detector("root-not-wrapped")
def root_not_wrapped(trace: Trace) -> Iterator[Hit]:
    if not trace.certain or not trains(trace):
        return
    for root in trace.roots.values():
        events = [(e, m) for e, m in trace.shards if root_of(m) is root]
        if not is_known(trace, root) or any(m is root for _, m in events):
            continue
        chosen = {one.name: one for e, m in events if m.kind == "item" for one in _classes_of(e, m)}
        if any(m.kind == "item" and not _classes_of(e, m) for e, m in events) or root.name in chosen:
            continue
        if not trace.forwards(root) or id(root) not in trace.trained or trace.escapes(root) or _reduced_by_hand(trace):
            continue
        managed = {id(m) for _, m in events}
        managed |= {id(part) for _, part in parts_of(root) for one in _elements(part) if one.name in chosen}
        plain = [n for n, part in parts_of(root) if not _inside(part, managed) and has_parameters(trace, part)]
        if plain and not any(e.open for e, _ in events):
            told = f"only parts of the model are sharded; {', '.join(dict.fromkeys(plain))} of {root.name} stay plain tensors"
            yield trace.hit("root-not-wrapped", told, events[-1][0])


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


def _reduced_by_hand(trace: Trace) -> bool:
    """Whether gradients are averaged, or parameters frozen, by the script itself."""
    stored = any(e.method in ("requires_grad", "grad") for e in trace.ops(STORE))
    frozen = bool(trace.methods("requires_grad_"))
    on_grads = any(
        part.name == "grad"
        for op in trace.matching(lambda n: n.rpartition(".")[2] in _BY_HAND)
        for a in op.given()
        for part in holders(a)
    )
    return stored or frozen or on_grads


@detector("root-only-wrap")
def root_only_wrap(trace: Trace) -> Iterator[Hit]:
    if not trace.certain or not trains(trace):
        return
    modules = {id(m): m for _, m in trace.shards}
    for event, module in trace.shards:
        if len(modules) != 1 or not is_known(trace, module) or event.loops:
            continue
        for name, part in parts_of(module):
            if part.name not in ("torch.nn.ModuleList", "torch.nn.Sequential") or len(part.event.args) == 0:
                continue
            elements = [one for given in part.event.args for one in inner(given)]
            many = len(elements) > 1 or any(a.name == "many" for a in part.event.args)
            heavy = all(one.kind == "object" and _layers(trace, one) > 1 for one in elements)
            if elements and many and heavy:
                told = f"fully_shard is called on the root alone: the modules of {module.name}.{name} have no group of their own"
                yield trace.hit("root-only-wrap", told, event)
                return


def _layers(trace: Trace, module: Value) -> int:
    return sum(has_parameters(trace, part) for _, part in parts_of(module))


@detector("parent-before-child")
def parent_before_child(trace: Trace) -> Iterator[Hit]:
    for event, module in trace.shards:
        for holder in list(holders(module))[1:]:
            parent = trace.first_shard.get(id(holder))
            if parent is not None and parent is not event and covers(parent, event):
                told = f"{text(event.node)} comes after its parent was sharded in line {parent.line}"
                yield trace.hit("parent-before-child", told, event)
                break


@detector("unsupported-module-or-param")
def unsupported_module(trace: Trace) -> Iterator[Hit]:
    for event, module in trace.shards:
        if made_by(module, "torch.nn.ModuleList", "torch.nn.ModuleDict") is not None:
            told = f"fully_shard is given a {module.name.rpartition('.')[2]}, which has no forward"
            yield trace.hit("unsupported-module-or-param", told, event)
        elif is_known(trace, module) and "ignored_params" not in event.kwargs and not event.open:
            for name, part in parts_of(module):
                if (
                    made_by(part, "torch.nn.Parameter") is not None
                    and part.event.args
                    and _is_scalar(part.event.args[0])
                ):
                    told = f"{module.name}.{name} is a parameter without a dimension, which fully_shard refuses"
                    yield trace.hit("unsupported-module-or-param", told, part.event)


def _is_scalar(value: Value) -> bool:
    if value.kind != "made" or value.event is None:
        return False
    shape = value.event.arg(0, "size")
    if value.name in ("torch.zeros", "torch.ones", "torch.empty", "torch.rand", "torch.randn") and shape is not None:
        return shape.kind in ("tuple", "list") and not shape.parts and shape.name != "many"
    number = value.event.arg(0, "data")
    return value.name == "torch.tensor" and number is not None and isinstance(number.const, int | float)


@detector("deepcopy-of-fsdp-model")
def deepcopy_of_model(trace: Trace) -> Iterator[Hit]:
    copies = ("copy.deepcopy", "torch.optim.swa_utils.AveragedModel")
    for event in trace.ops(*copies):
        model = event.args[0] if event.args else None
        if model is not None and trace.sharded_by(model, event) is not None:
            yield trace.hit(
                "deepcopy-of-fsdp-model", f"{text(event.node)} copies a model that is sharded already", event
            )


@detector("shard-option-unread")
def option_unread(trace: Trace) -> Iterator[Hit]:
    for event, _ in trace.shards:
        if made_by(event.kwargs.get("offload_policy"), "fsdp.CPUOffload") is not None:
            told = f"{text(event.node)}: FSDP1's CPUOffload is no CPUOffloadPolicy: nothing is offloaded"
            yield trace.hit("shard-option-unread", told, event)


@detector("no-sync-idiom")
def no_sync_idiom(trace: Trace) -> Iterator[Hit]:
    for event in trace.methods("no_sync"):
        model = event.on
        if model is not None and trace.sharded_by(model, event) is not None:
            yield trace.hit("no-sync-idiom", "a module sharded by fully_shard has no `no_sync`", event)
    for event in trace.ops(STORE):
        model = event.on if event.method == "require_backward_grad_sync" else None
        if model is not None and trace.sharded_by(model, event) is not None:
            told = f"{text(event.node)} does nothing on a sharded module: every micro-batch is reduced"
            yield trace.hit("no-sync-idiom", told, event)


_ADDS = ("resize_token_embeddings", "add_module", "register_module", "register_parameter", "add_adapter")


@detector("params-added-after-shard")
def params_added_after_shard(trace: Trace) -> Iterator[Hit]:
    late = {id(m): e for e, m in trace.shards}
    for event in trace.events:
        if event.op == STORE and event.on is not None and ".__init__" not in event.function:
            added = [v for v in choices(event.args[0]) if has_parameters(trace, v) and id(v) not in late]
            if added and trace.sharded_by(event.on, event) is not None and not _is_sharded_later(trace, event):
                yield trace.hit(
                    "params-added-after-shard", f"{text(event.node)} is set after its module was sharded", event
                )
        elif event.method in _ADDS and event.op == "" and event.on is not None:
            if trace.sharded_by(event.on, event) is not None:
                told = f"{event.method} adds parameters to a module that is sharded already"
                yield trace.hit("params-added-after-shard", told, event)
        elif event.op.endswith("get_peft_model") and event.args and trace.sharded_by(event.args[0], event) is not None:
            yield trace.hit(
                "params-added-after-shard", "get_peft_model adds parameters to a model that is sharded already", event
            )


def _is_sharded_later(trace: Trace, event: Event) -> bool:
    return any(e.index > event.index and m is event.on for e, m in trace.shards)


@detector("tied-weights-split-groups")
def tied_weights_split_groups(trace: Trace) -> Iterator[Hit]:
    together = [
        {id(x) for x in inner(e.args[0])} for e, _ in trace.shards if e.args and e.args[0].kind in ("list", "tuple")
    ]
    for event in trace.ops(STORE):
        value = event.args[0]
        if event.method != "weight" or value.kind != "attr" or value.name != "weight" or event.on is None:
            continue
        one, other = event.on, value.owner
        if other is None or one is other or root_of(one) is not root_of(other):
            continue
        alone = [m for m in (one, other) if id(m) in trace.first_shard]
        joint = any(id(one) in group and id(other) in group for group in together)
        if alone and not joint:
            told = f"{text(event.node)} is tied to a weight of another module, and only one of the two is in the group"
            shard = trace.first_shard[id(alone[0])]
            yield trace.hit("tied-weights-split-groups", told, shard)


@detector("custom-forward-bypass")
def custom_forward_bypass(trace: Trace) -> Iterator[Hit]:
    names = [one for e in trace.ops("fsdp.register_fsdp_forward_method") for a in e.args[1:2] for one in choices(a)]
    if any(one.kind != "const" for one in names):
        return
    registered = {one.const for one in names}
    for event in trace.methods("forward"):
        around = {event.function.rpartition(".")[2], "forward"} & registered
        if event.on is not None and trace.sharded_by(event.on, event) is not None and not around:
            yield trace.hit(
                "custom-forward-bypass", f"{text(event.node)} goes past the hooks that gather the parameters", event
            )
    seen: set[int] = set()
    for event in trace.events:
        owner = _own_module_call(trace, event)
        if owner is None or id(event.node) in seen or event.function.rpartition(".")[2] in registered:
            continue
        if trace.sharded_by(owner, event) is None or any(
            one.on is owner and _around(one, event) for one in trace.forwards(owner)
        ):
            continue
        seen.add(id(event.node))
        told = f"{event.function} runs {text(event.node)} outside of forward: nothing gathers the parameters for it"
        yield trace.hit("custom-forward-bypass", told, event)


def _around(forward: Event, event: Event) -> bool:
    return forward.function == event.function and forward.index < event.index


def _own_module_call(trace: Trace, event: Event) -> Value | None:
    """The known model in whose own method, not its forward, a plain part of it is called."""
    if event.op != CALL or event.on is None or event.on.kind != "made" or event.on.owner is None:
        return None
    owner = event.on.owner
    inside = event.function.rpartition(".")[2] not in ("forward", "__init__", "__call__", "<module>")
    if not inside or not is_known(trace, owner) or not event.function.startswith(f"{owner.name}."):
        return None
    alone = id(event.on) in trace.first_shard or not has_parameters(trace, event.on)
    return None if alone or event.on.name == "torch.nn.ModuleList" else owner


_MATRIX = ("F.linear", "F.embedding", "torch.matmul", "torch.mm", "torch.einsum", "F.layer_norm")


@detector("weight-used-outside-forward")
def weight_used_outside_forward(trace: Trace) -> Iterator[Hit]:
    for event in trace.ops(*_MATRIX):
        if event.function.rpartition(".")[2] == "forward":
            continue
        for value in event.given():
            if value.kind != "attr" or value.name not in ("weight", "bias") or value.owner is None:
                continue
            shard = trace.sharded_by(value.owner, event)
            kept = shard is None or shard.open or is_const(shard.kwargs.get("reshard_after_forward"), False)
            if not kept and not _unsharded(trace, value.owner):
                told = f"{text(event.node)} uses a weight that is a shard outside of its module's forward"
                yield trace.hit("weight-used-outside-forward", told, event)
                break


def _unsharded(trace: Trace, module: Value) -> bool:
    return bool(trace.methods("unshard")) or any(module is e.on for e in trace.events if e.op == CALL)
