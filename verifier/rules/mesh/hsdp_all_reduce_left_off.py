from ...source.flow_queries import never_on
from ...trace.events import AllReduce, Partial, Step, Stepped
from ..base import Evidence, Finding, Flow, Hits, Rule, count, some
from ._replicas import NO_REPLICAS, replicas_apart, replicas_at_start, replicas_of


class HsdpAllReduceLeftOff(Rule):
    """Every optimizer step on a hybrid mesh uses gradients that are all-reduced over the replicas.

    Why: with `set_requires_all_reduce(False)` gradients are not reduced over the replicas. If it is
    off in the last micro-batch too, `.grad` stays None and the step changes nothing; if only some
    are reduced, the replicas diverge.
    Wrong:
        model.set_requires_all_reduce(False)
        for micro in micros:
            loss_of(model, micro).backward()
        optimizer.step()
    Right:
        for i, micro in enumerate(micros):
            model.set_requires_all_reduce(i == len(micros) - 1)
            loss_of(model, micro).backward()
        optimizer.step()
    Fix: Set the flag before every micro-batch: True for the last one of the step, else False.
    Source: NVIDIA-NeMo/Automodel PR#3135; pytorch PR#125484; the docstring of
    `set_requires_all_reduce`.
    """

    def applies(self, evidence: Evidence) -> str:
        return (
            ""
            if evidence.trained.all(Partial) or replicas_at_start(evidence.trained)
            else NO_REPLICAS
        )

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        flags = sum(not r.value for r in run.places(AllReduce))
        line = run.line_of(AllReduce, last=True) or run.line_of(Step)
        held = next((r for r in run.all(Partial) if r.step <= run.steps()), None)
        if held is not None:
            what = (
                f"at step {held.step} the gradients of {count(len(held.groups), 'group')} are"
                " reduced within their replica"
            )
            calls = f"{count(flags, 'call')} of set_requires_all_reduce(False)"
            return self.failed(f"{what}, but not over the replicas ({calls})", line)
        before = replicas_at_start(run)
        # Replicas that begin apart are hsdp-replicas-diverge-at-init's: only those that begin equal
        # show what all-reduces do (fault hsdp_replicas_diverge_at_init*.yaml).
        same = set(before) - set(replicas_apart(before))
        if not same:
            return self.unknown(
                "no parameter starts equal in all replicas: see hsdp-replicas-diverge-at-init"
            )
        for step in range(1, run.steps() + 1):
            records = run.at_step(Stepped, step)
            entries = {n: run.parameters[n] for n in same}
            weights = {
                n: [records[e.rank].weights.get(n, e.sketch) for e in es]
                for n, es in entries.items()
            }
            if apart := replicas_apart(replicas_of(run, weights)):
                what = f"the replicas of {count(len(apart), 'parameter')} ({some(apart)})"
                return self.failed(
                    f"after step {step} {what} differ: their gradients were not all-reduced", line
                )
        what = f"{count(len(same), 'parameter')} equal in all replicas"
        return self.passed(f"{what} after each of {count(run.steps(), 'step')}")

    def detect(self, flow: Flow) -> Hits:
        yield from never_on(flow, "set_requires_all_reduce", "replicas never share gradients")
