from collections.abc import Iterator

from ...analysis.factors import micro_batches
from ...analysis.presence import unnamed, went_through
from ...evidence import Evidence
from ...finding import Finding, Hit
from ...source.events import STORE, Flow
from ...source.looks import text
from ...source.registry import detector
from ..base import RaisedRule


class NoSyncIdiom(RaisedRule):
    """Gradient accumulation uses `set_requires_gradient_sync`, not `no_sync`.

    Why: `no_sync` is a method of DDP and FSDP1. FSDP2 keeps your class and has a flag in its place. DDP's attribute
    `require_backward_grad_sync` can be set on a sharded module and does nothing: every micro-batch is reduced.
    Wrong:
        with model.no_sync():  # raises AttributeError
            loss_of(model, micros[0]).backward()
    Right:
        model.set_requires_gradient_sync(False)
        loss_of(model, micros[0]).backward()
        model.set_requires_gradient_sync(True)
        loss_of(model, micros[1]).backward()
    Fix: Call `model.set_requires_gradient_sync(is_last_micro_batch)` before each forward, without `no_sync`.
    Source: huggingface/accelerate PR#3762; NVIDIA/cosmos-framework#161.
    """

    pattern = r"'FSDP\w*' object has no attribute 'no_sync'"

    def applies(self, evidence: Evidence) -> str:
        used = not went_through(evidence) or not unnamed(evidence.sources, "no_sync", "require_backward_grad_sync")
        return "" if used else "the script uses no `no_sync`"

    def judge(self, evidence: Evidence) -> Finding:
        found = super().judge(evidence)
        hits = evidence.hits.get(self.name, ())  # what no error tells
        if hits and found.status == "pass":
            return self.failed(hits[0].told, hits[0].location, tier="static")
        if found.status == "pass" and micro_batches(evidence.trained) == 1:
            return self.unknown(
                "the sources name `no_sync`, and the run has one micro-batch a step: give it arguments that accumulate"
            )
        return found


@detector("no-sync-idiom")
def no_sync_idiom(flow: Flow) -> Iterator[Hit]:
    for event in flow.methods("no_sync"):
        model = event.on
        if model is not None and flow.sharded_by(model, event) is not None:
            yield flow.hit("no-sync-idiom", "a module sharded by fully_shard has no `no_sync`", event)
    for event in flow.ops(STORE):
        model = event.on if event.method == "require_backward_grad_sync" else None
        if model is not None and flow.sharded_by(model, event) is not None:
            told = f"{text(event.node)} does nothing on a sharded module: every micro-batch is reduced"
            yield flow.hit("no-sync-idiom", told, event)
