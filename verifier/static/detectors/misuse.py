"""What a sharded model is used for and cannot be: another wrapper, an object to write to a file, the methods of FSDP1."""

from __future__ import annotations

from collections.abc import Iterator

from ...finding import Hit
from ..events import CALL, STORE, Trace, covers
from ..looks import inner, is_const, is_known, made_by, text
from ..values import choices, root_of
from .registry import detector

_WRAPPERS = ("torch.nn.parallel.DistributedDataParallel", "torch.nn.DataParallel")


@detector("ddp-around-fsdp")
def ddp_around_fsdp(trace: Trace) -> Iterator[Hit]:
    for event in trace.ops(*_WRAPPERS):
        model = event.arg(0, "module")
        if model is not None and trace.sharded_by(model, event) is not None:
            yield trace.hit("ddp-around-fsdp", f"{text(event.node)} wraps a model that is sharded already", event)


@detector("sharded-twice")
def sharded_twice(trace: Trace) -> Iterator[Hit]:
    for event, module in trace.shards:
        first = trace.first_shard[id(module)]
        if first is not event and root_of(module) is module and is_known(trace, module) and covers(first, event):
            yield trace.hit("sharded-twice", f"{text(event.node)}: it was sharded in line {first.line} already", event)


_WRITERS = tuple(f"{module}.{name}" for module in ("pick" + "le", "cloudpick" + "le") for name in ("dump", "dumps"))


@detector("pickled-fsdp-model")
def pickled_model(trace: Trace) -> Iterator[Hit]:
    for event in trace.ops("torch.save", *_WRITERS):
        for value in inner(event.args[0]) if event.args else ():
            if value.kind == "object" and trace.sharded_by(value, event) is not None:
                yield trace.hit("pickled-fsdp-model", f"{text(event.node)} pickles the sharded model itself", event)
                break


@detector("fsdp1-idiom")
def fsdp1_idiom(trace: Trace) -> Iterator[Hit]:
    for event in trace.methods("clip_grad_norm_", "summon_full_params", "full_optim_state_dict"):
        if event.on is not None and trace.sharded_by(event.on, event) is not None:
            yield trace.hit("fsdp1-idiom", f"a module sharded by fully_shard has no `{event.method}`", event)


@detector("lowbit-or-unsupported-optimizer")
def unsupported_optimizer(trace: Trace) -> Iterator[Hit]:
    for event in trace.ops("torch.optim.Adafactor"):
        models = next((models for made, models in trace.optimizers if made is event), [])
        if any(trace.sharded_by(model, event) is not None for model in models):
            yield trace.hit(
                "lowbit-or-unsupported-optimizer", f"{text(event.node)} cannot step sharded matrices", event
            )


@detector("parameter-replaced-after-shard")
def parameter_replaced(trace: Trace) -> Iterator[Hit]:
    for event in trace.ops(STORE):
        value = event.args[0]
        outside = event.on is not None and ".__init__" not in event.function and event.method in ("weight", "bias")
        if not outside or event.on is None or made_by(value, "torch.nn.Parameter") is None:
            continue
        if trace.managed_by(event.on, event) is not None:
            told = f"{text(event.node)} is replaced after fully_shard has taken the old one"
            yield trace.hit("parameter-replaced-after-shard", told, event)
    for event in trace.methods("load_state_dict"):
        assign = event.kwargs.get("assign")
        if (
            event.on is not None
            and assign is not None
            and is_const(assign, True)
            and trace.sharded_by(event.on, event) is not None
        ):
            told = f"{text(event.node)} puts other parameters in the place of the sharded ones"
            yield trace.hit("parameter-replaced-after-shard", told, event)


@detector("submodule-forward-before-root")
def submodule_first(trace: Trace) -> Iterator[Hit]:
    for event in trace.by_op.get(CALL, []):
        module = event.on
        if module is None or event.function.rpartition(".")[2] == "forward" or trace.partial:
            continue
        for one in choices(module):
            root = root_of(one)
            shard = trace.sharded_by(one, event)
            if root is one or shard is None or trace.sharded_by(root, event) is None or not is_known(trace, root):
                continue
            forwards = trace.forwards(root)
            if forwards and event.index < forwards[0].index and covers(event, forwards[0]):
                told = f"{text(event.node)} runs a part of the sharded model before the model itself (line {forwards[0].line})"
                yield trace.hit("submodule-forward-before-root", told, event)
                return
