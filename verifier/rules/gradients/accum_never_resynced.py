from ...source.flow_queries import never_on
from ...trace.events import Step, Sync
from ..base import Evidence, Finding, Flow, Hits, count, some
from ._base import UnreducedRule


class AccumNeverResynced(UnreducedRule):
    """All gradients are reduced before the optimizer steps.

    Why: with `set_requires_gradient_sync(False)` FSDP accumulates unreduced gradients. Unless the
    last micro-batch is synced, `.grad` is None and the step changes nothing, or what is not reduced
    yet is added to the next step.
    Wrong:
        for i, micro in enumerate(micros):
            # never true: the last index is len - 1
            model.set_requires_gradient_sync(i == len(micros))
            loss_of(model, micro).backward()
        optimizer.step()
    Right:
        for i, micro in enumerate(micros):
            model.set_requires_gradient_sync(i == len(micros) - 1)
            loss_of(model, micro).backward()
        optimizer.step()
    Fix: Set the flag before every micro-batch, True for the last one of the step; step only after a
    synced backward.
    Source: pytorch PR#118298 (review); FSDP2 has no `no_sync`, see
    `FSDPModule.set_requires_gradient_sync`.
    """

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        for record in run.all(Step):
            # Other optimizers may step later, when the gradients of their own parameters have been
            # reduced.
            # Another optimizer steps later, when its own parameters' gradients have been reduced:
            # only those that this one holds are lost (zoo/two_optimizers.py, exam GANs).
            lost = [name for name in record.unsynced if name in record.held]
            if lost and record.step <= run.steps():
                empty = any(record.grads_at_step.get(n) is None for n in lost)
                state = "have no `.grad`" if empty else "lack that part of `.grad`"
                text = (
                    f"{count(len(lost), 'parameter')} ({some(lost)}) {state}: their gradients are"
                    " not reduced"
                )
                line = run.line_of(Sync, last=True) or record.at_line
                return self.failed(f"at the optimizer step {record.step} {text}", line)
        flags = count(len(run.traces[0].of(Sync)), "sync flag")
        return self.passed(f"no unreduced gradient at {count(run.steps(), 'step')} ({flags} seen)")

    def detect(self, flow: Flow) -> Hits:
        yield from never_on(flow, "set_requires_gradient_sync", "gradients are never reduced")
