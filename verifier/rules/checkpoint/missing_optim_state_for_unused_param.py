from dataclasses import replace

from ...trace.events import Step
from ..base import Evidence, Finding, RaisedRule, RootCause, Run, count, some
from ..raised import stack
from ._resumed import NEEDS, keeps_no_state, not_shown


class MissingOptimState(RaisedRule):
    """Every trainable parameter gets gradients, or the resume allows missing optimizer state.

    Why: a parameter that never got a gradient has no optimizer state, so the checkpoint has none;
    the resume asks for it, because the state-dict functions initialise the state of all trainable
    parameters.
    Wrong:
        whole = StateDictOptions(full_state_dict=True)
        model.unused = nn.Linear(8, 8)
        shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        loss_of(model, batch).backward()
        optimizer.step()
        states = get_state_dict(model, optimizer, options=whole)
        optimizer = torch.optim.AdamW(model.parameters())
        set_state_dict(  # raises RuntimeError
            model, optimizer, model_state_dict=states[0], optim_state_dict=states[1], options=whole
        )
    Right:
        model.unused = nn.Linear(8, 8).requires_grad_(False)
        shard(model)
        optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
        loss_of(model, batch).backward()
        optimizer.step()
        states = get_state_dict(model, optimizer)
    Fix: Freeze the parameter (`requires_grad_(False)`) or remove it; else leave its state out of
    the template.
    Source: pytorch#192224; pytorch#192202; verl PR#7283; InternLM/xtuner PR#2018.
    """

    simulated = False
    needs = NEEDS
    # Three texts of one error: DCP's missing key (state names of Adam and SGD), torch's state-dict
    # helper, and Adam reading its step from an empty dict (fault
    # missing_optim_state_for_unused_param.yaml).
    pattern = (
        r"Missing key in checkpoint state_dict:"
        r" \S*state\.(?P<key>\S+?)\.(step|exp_avg|exp_avg_sq|momentum_buffer)\b|"
        r"Missing optimizer state for parameter '(?P<name>[^']+)'|"
        r"float\(\) argument must be a string or a real number, not 'dict'"
    )

    def applies(self, evidence: Evidence) -> str:
        train = evidence.train
        return super().applies(evidence) or (keeps_no_state(train) if train is not None else "")

    def judge(self, evidence: Evidence) -> Finding:
        found = super().judge(evidence)
        if found.status == "pass" and evidence.resume is None:
            found = self.unknown(not_shown(evidence))
        unused = _never_used(evidence.train)
        if not unused or (found.status == "inconclusive" and evidence.resume is not None):
            return found
        which = f"{count(len(unused), 'trainable parameter')} never got a gradient: {some(unused)}"
        more = (
            ""
            if found.status == "fail"
            else "; a resume that asks for their optimizer state will fail"
        )
        return replace(found, evidence=f"{found.evidence}; {which}{more}")

    def fits(self, run: Run, cause: RootCause) -> bool:
        # The third text may come from any float(): it is this error only if a frame of state_dict
        # code is in the stack.
        return "float() argument" not in cause.error or any(
            "state_dict" in f.file for f in stack(run, cause)
        )


def _never_used(run: Run | None) -> list[str]:
    """Trainable parameters without a gradient at any step, on any rank, of a run that made
    steps.
    """
    if run is None or run.steps() == 0:
        return []
    used = {n for r in run.all(Step) for n, g in r.grads_at_step.items() if g is not None}
    held = {n for r in run.all(Step) for n in r.held}
    return [n for n, e in run.parameters.items() if e[0].trainable and n in held and n not in used]
