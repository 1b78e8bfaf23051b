from ...source.events import CALL, NEW, SHARD, Event, Flow, covers
from ...source.flow_queries import emptied, text
from ..base import Hits, Run
from ._empty import EmptyRule

# Methods by which a script gets at modules or loads them: after one of these the weights may be
# written, and nothing is reported (faults meta_params_not_reset.py; pairs.yaml).
_TOUCHES = ("modules", "named_modules", "buffers", "named_buffers", "children", "load_state_dict")
# `parameters()` outside a loop goes straight into an optimizer; in a loop the script may write each
# of them (pairs.yaml meta-params-not-reset).
_TOUCHES_IN_LOOP = ("parameters", "named_parameters")  # else they go straight into an optimizer


class MetaParamsNotReset(EmptyRule):
    """Every parameter that `to_empty` allocates is initialised before the first forward.

    Why: an initialisation that visits `nn.Linear` and `nn.Embedding` misses a raw `nn.Parameter`,
    which then holds uninitialised memory. The loss is NaN, or it falls with one tensor wrong.
    Wrong:
        with torch.device("meta"):
            model = Decoder()
        shard(model)
        model.to_empty(device="cpu")
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                module.reset_parameters()  # model.scale is a raw nn.Parameter: never written
        model.init_buffers()
    Right:
        with torch.device("meta"):
            model = Decoder()
        shard(model)
        model.to_empty(device="cpu")
        model.init_weights()  # walks over named_parameters(), so it writes model.scale too
        model.init_buffers()
    Fix: Initialise in a loop over `named_parameters()`, which leaves none out, or load a checkpoint
    that has them all.
    Source: ByteDance-Seed/VeOmni#118; pytorch/torchtitan docs/fsdp.md; the probe fills that memory
    with NaN.
    """

    # Buffers do not: shards are equal since parameters were drawn so (two faults in one script).
    explains = (*EmptyRule.explains, "dtensor-rng-identical-shards-cpu")
    kind = "parameter"

    def parts(self, run: Run) -> list[tuple[str, bool]]:
        return [(name, any(e.unset for e in entries)) for name, entries in run.parameters.items()]

    def detect(self, flow: Flow) -> Hits:
        for event, model in emptied(flow):
            run = next((f for f in flow.forwards(model) if covers(event, f)), None)
            if run is None or any(map(_may_write, flow.events[event.index + 1 : run.index])):
                continue
            if not flow.escapes(model, event.index, run.index):
                what = f"leaves the parameters uninitialised until the forward in line {run.line}"
                yield f"{text(event.node)} {what}", event


def _may_write(event: Event) -> bool:
    """Whether an event may write a parameter."""
    if (
        event.method in _TOUCHES
        or (event.method in _TOUCHES_IN_LOOP and event.loops)
        or event.method.endswith("_")
    ):
        return True
    if event.op in (SHARD, "dist.get_rank", "dist.get_world_size", "dist.barrier"):
        return False
    return event.op in (NEW, CALL) or event.op.startswith(
        ("torch.nn.init.", "dsd.set", "dcp.load", "dist.", "tensor.")
    )
