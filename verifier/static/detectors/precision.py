"""In which dtype weights are kept, computed with and reduced."""

from __future__ import annotations

from collections.abc import Iterator

from ...finding import Hit
from ..events import Event, Trace, covers
from ..looks import FULL, LOW, identifiers, is_const, is_dtype, is_known, made_by, text, trains
from ..values import Value, choices, holders, root_of
from .registry import detector

POLICY = "fsdp.MixedPrecisionPolicy"
_SCALES = ("loss_scale", "scale_loss", "scale")
_CASTS = {"bfloat16": True, "half": True, "float": False, "double": False}


def _cast(event: Event) -> bool | None:
    """Whether a method call casts to low (True) or full (False) precision; None if it does not cast, or it is not known."""
    if event.method in _CASTS and not event.args:
        return _CASTS[event.method]
    if event.method == "to":
        for value in event.given():
            if is_dtype(value, LOW) or is_dtype(value, FULL):
                return is_dtype(value, LOW)
    return None


def _trained_by_torch(trace: Trace, model: Value) -> bool:
    return any(model in models and event.op.startswith("torch.optim.") for event, models in trace.optimizers)


@detector("bf16-master-weights")
def low_master_weights(trace: Trace) -> Iterator[Hit]:
    for root in trace.roots.values():
        shard = trace.first_shard.get(id(root))
        if shard is None or not _trained_by_torch(trace, root):
            continue
        casts = [e for e in trace.events if e.on is root and _cast(e) is not None]
        if any(_cast(e) is False for e in casts) or _is_frozen(trace):
            continue
        low = [e for e in casts if covers(e, shard)] or _born_low(trace, root, shard)
        if low:
            told = f"{text(low[0].node)}: the weights that the optimizer keeps are 16 bits wide"
            yield trace.hit("bf16-master-weights", told, low[0])


def _is_frozen(trace: Trace) -> bool:
    """Whether some parameters do not train: then low precision may be meant for those."""
    partly = any(e.method == "requires_grad" for e in trace.by_op.get("(store)", ()))
    return partly or bool(trace.methods("requires_grad_"))


def _born_low(trace: Trace, root: Value, shard: Event) -> list[Event]:
    """The call that made a model in low precision."""
    born: Event | None = root.event
    if born is None or not covers(born, shard):
        return []
    dtype = born.kwargs.get("torch_dtype") or born.kwargs.get("dtype")
    if root.kind == "made" and is_dtype(dtype, LOW) and dtype is not None:
        return [born]
    found: list[Event] = []
    for event in trace.ops("torch.set_default_dtype"):
        if event.index < born.index and not event.guards and event.args:
            found = [event] if is_dtype(event.args[0], LOW) else []
    return found


def _policies_of_trained(trace: Trace) -> list[Value]:
    """The policies with which models that an optimizer holds are sharded."""
    pairs = [(v, m) for e, m in trace.shards if (v := e.kwargs.get("mp_policy")) is not None]
    return [policy for policy, module in pairs if any(id(h) in trace.trained for h in holders(module))]


@detector("reduce-dtype-follows-param-dtype")
def reduce_dtype_follows(trace: Trace) -> Iterator[Hit]:
    if not trains(trace):
        return
    used = _policies_of_trained(trace)
    for event in trace.ops(POLICY):
        low = is_dtype(event.arg(0, "param_dtype"), LOW)
        reduce = event.arg(1, "reduce_dtype")
        unset = reduce is None or is_const(reduce, None)
        if low and unset and not event.open and any(event.result in choices(v) for v in used):
            told = f"{text(event.node)} has no reduce_dtype: gradients are summed over the ranks in 16 bits"
            yield trace.hit("reduce-dtype-follows-param-dtype", told, event)


@detector("output-dtype-on-inner-blocks")
def output_dtype_on_inner_blocks(trace: Trace) -> Iterator[Hit]:
    for event, module in trace.shards:
        policy = made_by(event.kwargs.get("mp_policy"), POLICY)
        if policy is None or not event.loops or root_of(module) is module:
            continue
        root = root_of(module)
        outer = trace.first_shard.get(id(root))
        whole = made_by(outer.kwargs.get("mp_policy"), POLICY) if outer is not None else None
        low = whole is not None and is_dtype(whole.arg(0, "param_dtype"), LOW)
        widens = is_dtype(policy.arg(2, "output_dtype"), FULL) and is_dtype(policy.arg(0, "param_dtype"), LOW)
        if low and widens and is_known(trace, root) and not _casts_inside(root):
            told = "every block gives float32 to a module of the root, whose parameters are cast to 16 bits"
            yield trace.hit("output-dtype-on-inner-blocks", told, policy)
            return


def _casts_inside(root: Value) -> bool:
    """Whether the model's own forward casts."""
    forward = root.cls.methods.get("forward")
    lines = root.cls.home.lines[forward.lineno - 1 : forward.end_lineno] if forward is not None else [".to("]
    return any(word in line for line in lines for word in (".to(", ".type", "autocast", "bfloat16"))


@detector("fp16-without-scaler")
def fp16_without_scaler(trace: Trace) -> Iterator[Hit]:
    if not trace.certain or not trains(trace):
        return
    used = _policies_of_trained(trace)
    for event in trace.ops(POLICY):
        low = is_dtype(event.arg(0, "param_dtype"), LOW[1:]) and any(event.result in choices(v) for v in used)
        if low and not any("scaler" in word.lower() or word in _SCALES for word in identifiers(trace)):
            yield trace.hit(
                "fp16-without-scaler", f"{text(event.node)}, and no GradScaler: small gradients become 0", event
            )


@detector("mixed-orig-dtype-in-group")
def mixed_orig_dtype_in_group(trace: Trace) -> Iterator[Hit]:
    """A model cast to 16 bits of which one part is cast back, in one group with the rest."""
    for event in trace.events:
        if event.on is None or event.on.owner is None or _cast(event) is not False:
            continue
        group = next((h for h in holders(event.on) if id(h) in trace.first_shard), None)
        if (
            group is None
            or group is event.on
            or not covers(event, trace.first_shard[id(group)])
            or trace.methods("requires_grad_")
        ):
            continue
        low = [
            e for e in trace.events[: event.index] if e.on is root_of(group) and _cast(e) is True and covers(e, event)
        ]
        if low and is_known(trace, root_of(group)):
            told = f"{text(event.node)}: float32 in one group with what {text(low[0].node)} cast in line {low[0].line}"
            yield trace.hit("mixed-orig-dtype-in-group", told, event)
