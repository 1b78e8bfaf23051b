from ...source.events import Flow, covers
from ...source.flow_queries import is_const, text
from ...source.values import const
from ..base import Hits
from ._held import HeldRule


class OptimBuiltAfterForward(HeldRule):
    """The optimizer is built before any forward, or after `reshard()`.

    Why: a forward leaves the root group unsharded (without gradients, or with
    `reshard_after_forward=False`, others too). `model.parameters()` then returns temporary tensors:
    embedding, norm and head do not train, the blocks do.
    Wrong:
        shard(model)
        with torch.no_grad():
            model(batch)  # a shape check, a FLOP count, a first evaluation
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    Right:
        shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        with torch.no_grad():
            model(batch)
    Fix: Build the optimizer right after sharding, or call `model.reshard()` before building it.
    Source: pytorch#149205; pytorch#144289.
    """

    after_forward, built = True, "after a forward"

    def detect(self, flow: Flow) -> Hits:
        for event, models in flow.optimizers:
            for model in models:
                shard = flow.sharded_by(model, event)
                if shard is None or shard.open:
                    continue
                # Only the root with its default stays gathered after a forward (torch keeps it for
                # the backward); with True or False given it does not, or is meant (fault
                # optim_built_after_forward.py).
                default = is_const(shard.kwargs.get("reshard_after_forward", const(None)), None)
                ran = [f for f in flow.forwards(model) if covers(shard, f) and covers(f, event)]
                taken = flow.methods("parameters", "named_parameters")
                if not default or not ran or any(e.index < ran[-1].index for e in taken):
                    continue
                between = flow.events[ran[0].index : event.index]
                if not any(
                    # Calls that reshard the root before the optimizer is built.
                    e.method in ("backward", "reshard", "state_dict") or e.op.startswith("dsd.")
                    for e in between
                ):
                    what = (
                        f"this optimizer holds temporary tensors: {text(ran[0].node)} in line"
                        f" {ran[0].line}"
                    )
                    yield f"{what} left the root unsharded", event
                    break
