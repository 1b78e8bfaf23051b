from ...trace.events import Step, Template
from ..base import Evidence, Finding, Rule, Run, count
from ..policies import ShownBy
from ._resumed import NEEDS, keeps_no_state, not_resumed, not_shown


class OptimTemplateWithGrads(Rule):
    """The optimizer's state dict is taken while no gradient exists, or after a step.

    Why: torch's helpers create missing optimizer state for a template, unless any `.grad` exists:
    then they silently return an empty state, and the load into it restores nothing.
    Wrong:
        optimizer = torch.optim.AdamW(shard(model).parameters(), lr=1e-3)
        loss_of(model, batch).backward()  # a warm-up before the load
        # no entries for `dcp.load` to fill
        state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    Right:
        optimizer = torch.optim.AdamW(shard(model).parameters(), lr=1e-3)
        loss_of(model, batch).backward()
        optimizer.zero_grad(set_to_none=True)
        state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    Fix: Call `optimizer.zero_grad(set_to_none=True)` before the helper, or load before any
    backward.
    Source: pytorch#140898.
    """

    policies = (ShownBy("resume-is-exact"),)
    explains = ("optim-template-empty",)
    wants = "run"
    needs = NEEDS

    def applies(self, evidence: Evidence) -> str:
        if reason := super().applies(evidence) or keeps_no_state(evidence.trained):
            return reason
        taken = _taken(evidence.trained) or _taken(evidence.resume)
        return not_resumed(
            evidence, taken, "the script takes no state dict of an optimizer with torch's functions"
        )

    def judge(self, evidence: Evidence) -> Finding:
        runs = [run for run in (evidence.trained, evidence.resume) if run is not None]
        keeps = any(state for run in runs for r in run.all(Step) for state in r.state.values())
        taken = [(run.role, record) for run in runs for record in _taken(run)]
        for role, record in taken:
            # torch's helper makes no state where gradients exist before the first step; one that
            # has state, or stepped and keeps none (SGD: had_state), was not emptied (exam round 5
            # q_04_multitask_weights twin).
            if keeps and record.had_grads and not record.had_state and record.states == 0:
                what = "returned no optimizer state: gradients existed before the first step"
                return self.failed(f"{record.op} in the {role} run {what}", record.at_line)
        if not taken or evidence.resume is None:
            return self.unknown(not_shown(evidence))
        return self.passed(
            f"{count(len(taken), 'state dict')} of optimizers, none emptied by gradients"
        )


def _taken(run: Run | None) -> list[Template]:
    """The state dicts of optimizers that rank 0 took."""
    return (
        [r for r in run.traces[0].of(Template) if r.optimizers]
        if run is not None and run.traces
        else []
    )
