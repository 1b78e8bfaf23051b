from ...source.events import CALL, Event, Flow
from ...source.flow_queries import has_parameters, is_known, text
from ...source.values import Value, choices
from ..base import Hits
from ..raised import MixedRule
from ._base import called_on_sharded


class CustomForwardBypass(MixedRule):
    """A sharded module runs only as `module(...)` or through a method registered for FSDP.

    Why: FSDP gathers weights in hooks around `module(...)`. A custom method (`generate`, `encode`,
    `compute_loss`), or a submodule that is not an FSDP module itself, runs without these hooks on
    the shards.
    Wrong:
        hidden = model.embedding(batch)  # raises RuntimeError
    Right:
        logits = model(batch)
    Fix: Call `register_fsdp_forward_method(model, "method")` after `fully_shard(model)`, or go
    through `model(...)`.
    Source: pytorch PR#125394; huggingface/transformers#30228; pytorch#156535; huggingface/trl#4550.
    """

    def detect(self, flow: Flow) -> Hits:
        names = [
            one
            for e in flow.ops("fsdp.register_fsdp_forward_method")
            for a in e.args[1:2]
            for one in choices(a)
        ]
        if any(one.kind != "const" for one in names):
            return
        registered = {one.const for one in names}
        for event in called_on_sharded(flow, "forward"):
            # A method that was given to register_fsdp_forward_method gathers its parameters
            # (zoo/forward_method.py).
            if not {event.function.rpartition(".")[2], "forward"} & registered:
                yield f"{text(event.node)} bypasses the hooks that gather the parameters", event
        for event in flow.events:
            owner = _own_module_call(flow, event)
            if (
                owner is None
                or flow.sharded_by(owner, event) is None
                or event.function.rpartition(".")[2] in registered
            ):
                continue
            before = [
                one for one in flow.forwards(owner) if one.on is owner and one.index < event.index
            ]
            # After a forward the root stays gathered up to the backward: a head may run there
            # (FSDPToys: `compute_logits`), in a function with a forward of its own in any case.
            if not any(
                one.function == event.function or not _backward_between(flow, one, event)
                for one in before
            ):
                what = (
                    f"{event.function} runs {text(event.node)} outside of forward: no hook gathers"
                    " its parameters"
                )
                yield what, event


def _backward_between(flow: Flow, forward: Event, event: Event) -> bool:
    calls = flow.by_method.get("backward", ())
    return any(forward.index < one.index < event.index for one in calls)


def _own_module_call(flow: Flow, event: Event) -> Value | None:
    """The known model in whose own method, not its forward, a plain part of it is called."""
    if event.op != CALL or event.on is None or event.on.kind != "made" or event.on.owner is None:
        return None
    owner = event.on.owner
    inside = event.function.rpartition(".")[2] not in (
        "forward",
        "__init__",
        "__call__",
        "<module>",
    )
    if not inside or not is_known(flow, owner) or not event.function.startswith(f"{owner.name}."):
        return None
    alone = id(event.on) in flow.first_shard or not has_parameters(flow, event.on)
    return None if alone or event.on.name == "torch.nn.ModuleList" else owner
