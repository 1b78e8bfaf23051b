from ...trace.events import Stale
from ..base import Evidence, Finding, count, some
from ._base import ShardedModelRule


class StaleUnshardedAfterStep(ShardedModelRule):
    """No forward runs on weights that were gathered before the shards changed.

    Why: a group that stays unsharded keeps a gathered copy. The optimizer, or a script that swaps
    in averaged weights or tries a step size, writes to the shards; if nothing frees the copy, the
    next forward gathers nothing and computes with the old weights. This happens after an evaluation
    between backward and step (the root stays gathered after a forward without backward), and with
    `reshard_after_forward=False` after any evaluation.
    Wrong:
        loss_of(model, batch).backward()
        with torch.no_grad():
            loss_of(model, batch)  # gathers the root and keeps it gathered
        optimizer.step()
    Right:
        loss_of(model, batch).backward()
        optimizer.step()
        with torch.no_grad():
            loss_of(model, batch)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
    Fix: Evaluate after the step, not between backward and step, and call `reshard()` on every
    FSDPModule after a forward without backward, before anything writes to its parameters.
    Source: pytorch#149029, #154655, #144289 (the root stays gathered by design); measured: the same
    loss twice. Law L4: whenever a root is called, the gathered weights of groups that are still
    unsharded are compared with the shards.
    """

    simulated = True

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        stale = next(iter(run.all(Stale)), None)
        if stale is None:
            what = f"no group stayed gathered over any of {count(run.steps(), 'optimizer step')}"
            return self.passed_with_steps(run, what)
        names = some(f"'{name or 'root'}'" for name in stale.groups)
        changed = "that step" if stale.stepped else "the script changed the parameters"
        what = (
            f"a forward after step {stale.after_step} uses weights of group {names} that were"
            f" gathered before {changed}"
        )
        return self.failed(f"{what}: the group was not resharded", stale.evaluated or stale.at_line)
