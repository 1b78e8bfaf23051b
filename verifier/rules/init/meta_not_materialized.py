from ...analysis.applicability import went_through
from ...trace.events import Place, Shard, ToEmpty
from ..base import Evidence, RaisedRule, RootCause, Run
from ..policies import AfterSharding, NeedsSharding


class MetaNotMaterialized(RaisedRule):
    """A model built on the meta device is materialized and initialised before its first forward.

    Why: tensors on the meta device have a shape and no data. `fully_shard` leaves them there; the
    first forward raises.
    Wrong:
        with torch.device("meta"):
            model = Decoder()
        shard(model)
        model(batch)  # raises RuntimeError
    Right:
        with torch.device("meta"):
            model = Decoder()
        shard(model)
        model.to_empty(device="cpu")
        model.init_weights()
        model.init_buffers()
        model(batch)
    Fix: After `fully_shard` call `model.to_empty(device=...)`, then initialise every parameter and
    every buffer (with the model's own initialisation, or from a checkpoint).
    Source: pytorch PR#120351.
    """

    pattern = (
        r"FSDP parameters should be materialized from meta device|Cannot copy out of meta tensor;"
        r" no data!"
    )
    policies = (AfterSharding(), NeedsSharding())

    def applies(self, evidence: Evidence) -> str:
        if not went_through(evidence):
            return ""
        real = any(record.parameters for record in evidence.trained.all(Shard))
        # Parameters with values at the sharding were not on the meta device.
        known = real and not evidence.trained.all(ToEmpty)
        return "the model is not on the meta device when it is sharded" if known else ""

    def place(self, run: Run, cause: RootCause) -> Place | None:
        """The last sharding: `to_empty` belongs below it."""
        return (
            cause.location
            if "Cannot copy" in cause.error
            else run.line_of(Shard, last=True) or cause.location
        )
