from ...analysis.gradient_scale_causes import micro_batches
from ...source.events import STORE, Flow
from ...source.flow_queries import text
from ..base import Evidence, Finding, Hits, RaisedRule, Uncovered

_IN_VAIN = "has no effect on a sharded module: every micro-batch is reduced"


class NoSyncIdiom(RaisedRule):
    """Gradient accumulation uses `set_requires_gradient_sync`, not `no_sync`.

    Why: `no_sync` is a method of DDP and FSDP1; FSDP2 has a flag instead. Setting DDP's attribute
    `require_backward_grad_sync` on a sharded module does nothing: every micro-batch is reduced.
    Wrong:
        with model.no_sync():  # raises AttributeError
            loss_of(model, micros[0]).backward()
    Right:
        model.set_requires_gradient_sync(False)
        loss_of(model, micros[0]).backward()
        model.set_requires_gradient_sync(True)
        loss_of(model, micros[1]).backward()
    Fix: Call `model.set_requires_gradient_sync(is_last_micro_batch)` before each forward, without
    `no_sync`.
    Source: huggingface/accelerate PR#3762; NVIDIA/cosmos-framework#161.
    """

    pattern = r"'FSDP\w*' object has no attribute 'no_sync'"
    named_by = ("no_sync", "require_backward_grad_sync")

    def judge(self, evidence: Evidence) -> Finding:
        found = super().judge(evidence)
        # The attribute of DDP raises nothing. A method that is not there would have: code that asks
        # for it and trains all the same asks another model (`isinstance(model, DDP)` in OLMo-core)
        # or whether it is there (`getattr(model, "no_sync", nothing)` in accelerate).
        hits = [hit for hit in evidence.hits.get(self.name, ()) if _IN_VAIN in hit.message]
        if hits and found.status == "pass":
            return self.failed(hits[0].message, hits[0].location, tier="static")
        # With one micro-batch a step the branch with `no_sync` never runs: not covered, with
        # advice (fault no_sync_idiom_2.yaml).
        if found.status == "pass" and micro_batches(evidence.trained) == 1:
            advice = "give it arguments that accumulate gradients"
            reason = f"the sources name `no_sync`, and the run has one micro-batch a step: {advice}"
            return self.unknown(Uncovered(reason, "accumulation"))
        return found

    def detect(self, flow: Flow) -> Hits:
        found = [
            (e, "a module sharded by fully_shard has no `no_sync`") for e in flow.methods("no_sync")
        ]
        stored = (e for e in flow.ops(STORE) if e.method == "require_backward_grad_sync")
        found += [(e, f"{text(e.node)} {_IN_VAIN}") for e in stored]
        for event, what in found:
            if event.on is not None and flow.sharded_by(event.on, event) is not None:
                yield what, event
