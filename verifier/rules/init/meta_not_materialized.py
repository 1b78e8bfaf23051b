from ...analysis.presence import never_sharded, went_through
from ...trace.events import Place, Shard, ToEmpty
from ..base import Evidence, RaisedRule, RootCause, Run


class MetaNotMaterialized(RaisedRule):
    """A model built on the meta device is materialized and initialised before its first forward.

    Why: tensors on the meta device have a shape and no data. `fully_shard` leaves them there; the first forward raises.
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
    Fix: After `fully_shard` call `model.to_empty(device=...)`, then initialise every parameter and every buffer (with
    the model's own initialisation, or from a checkpoint).
    Source: pytorch PR#120351.
    """

    pattern = r"FSDP parameters should be materialized from meta device|Cannot copy out of meta tensor; no data!"

    def applies(self, evidence: Evidence) -> str:
        if not went_through(evidence):
            return ""
        traces = evidence.trained.traces
        real = any(record.parameters for trace in traces for record in trace.of(Shard))
        emptied = any(trace.first(ToEmpty) is not None for trace in traces)
        return "the model is not on the meta device when it is sharded" if real and not emptied else ""

    def unseen(self, evidence: Evidence) -> str:
        return never_sharded(evidence)

    def fits(self, run: Run, cause: RootCause) -> bool:
        return run.line_of(Shard, last=True) is not None

    def place(self, run: Run, cause: RootCause) -> Place | None:
        """The last sharding: `to_empty` belongs below it."""
        return cause.location if "Cannot copy" in cause.error else run.line_of(Shard, last=True) or cause.location
