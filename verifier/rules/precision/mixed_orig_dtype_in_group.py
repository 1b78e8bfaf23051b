from ...source.events import Flow, covers
from ...source.flow_queries import cast_of, is_known, text
from ...source.values import holders, root_of
from ...trace.events import Place, Shard
from ..base import Hits, RaisedRule, RootCause, Run
from ..policies import NeedsSharding


class MixedOrigDtypeInGroup(RaisedRule):
    """All trainable parameters of one FSDP group have one dtype before sharding.

    Why: a group is gathered and reduced as one buffer of one dtype. Norms or adapters in float32 in
    a bfloat16 block, or a frozen quantised block with trainable parts, raise an error.
    Wrong:
        for block in model.blocks:
            block.up.to(torch.bfloat16)
        shard(model)
        model(batch)  # raises AssertionError
    Right:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard(model, mp_policy=policy)
        model(batch)
    Fix: Keep all parameters in float32 and let `mp_policy` cast, or first shard the modules of
    another dtype alone.
    Source: huggingface/accelerate PR#3985; pytorch#156784; hiyouga/LlamaFactory PR#10157.
    """

    pattern = r"FSDP expects uniform (original parameter|reduce) dtype"
    policies = (NeedsSharding(),)

    def place(self, run: Run, cause: RootCause) -> Place | None:
        mixed = (r.at_line for r in run.places(Shard) if len({p.dtype for p in r.parameters}) > 1)
        return next(mixed, cause.location)

    def detect(self, flow: Flow) -> Hits:
        """A model cast to 16 bits of which one part is cast back, in one group with the rest."""
        for event in flow.events if not flow.methods("requires_grad_") else ():
            if event.on is None or event.on.owner is None or cast_of(event) is not False:
                continue
            group = next((h for h in holders(event.on) if id(h) in flow.first_shard), None)
            if group is None or group is event.on or not covers(event, flow.first_shard[id(group)]):
                continue
            root = root_of(group)
            low = [
                e
                for e in flow.events[: event.index]
                if e.on is root and cast_of(e) is True and covers(e, event)
            ]
            if low and is_known(flow, root):
                what = (
                    f"{text(event.node)}: float32 in one group with what {text(low[0].node)} in"
                    f" line {low[0].line} casts"
                )
                yield what, event
