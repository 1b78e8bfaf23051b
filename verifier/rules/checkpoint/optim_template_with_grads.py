"""The rule `optim-template-with-grads`."""

from __future__ import annotations

from ...analysis.wording import count
from ...evidence import Evidence
from ...finding import Finding
from ...trace.events import Step, Template
from ..base import Rule


class OptimTemplateWithGrads(Rule):
    """The optimizer's state dict is taken when no gradient is there, or after a step.

    Why: torch's helpers create missing optimizer state for a template, unless any `.grad` exists: then they give back an
    empty state without a word, and the load that it is for restores nothing.
    Wrong:
        optimizer = torch.optim.AdamW(shard(model).parameters(), lr=1e-3)
        loss_of(model, batch).backward()  # a warm-up before the load
        state = {"optimizer": get_optimizer_state_dict(model, optimizer)}  # no entries for `dcp.load` to fill
    Right:
        optimizer = torch.optim.AdamW(shard(model).parameters(), lr=1e-3)
        loss_of(model, batch).backward()
        optimizer.zero_grad(set_to_none=True)
        state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    Mend: Call `optimizer.zero_grad(set_to_none=True)` before the helper, or load before any backward.
    Source: pytorch#140898.
    Torch: run on 2.13.0.
    """

    explains = ("optim-template-empty",)

    needs = frozenset({"train", "resume"})

    def judge(self, evidence: Evidence) -> Finding:
        runs = [run for run in (evidence.train, evidence.resume) if run is not None]
        if not runs:
            return self.unknown("the script was not run")
        keeps = any(state for run in runs for trace in run.traces for r in trace.of(Step) for state in r.state.values())
        taken = 0
        for run in runs:
            for trace in run.traces[:1]:
                for record in (r for r in trace.of(Template) if r.optimizers):
                    taken += 1
                    if keeps and record.had_grads and not record.had_state and record.states == 0:
                        return self.failed(
                            f"{record.op} gave 0 entries of optimizer state in the {run.role} run: gradients were there before any step",
                            record.at_line,
                        )
        return self.passed(f"{count(taken, 'state dict')} of optimizers, none emptied by gradients")
