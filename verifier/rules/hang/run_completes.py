from ...analysis.applicability import without_steps
from ...analysis.root_cause import root_cause
from ..base import Evidence, Finding, Rule, count
from ..policies import OnlyExplained


class RunCompletes(Rule):
    """Every rank reaches the end of the run: none crashes, hangs, is killed or exits early.

    Why: a collective that only some ranks call waits for ever, and launchers name the wrong rank:
    torchrun always exits 1 and reports the rank that it stopped itself when another exited
    silently.
    Wrong:
        if dist.get_rank() == 0:
            options = StateDictOptions(full_state_dict=True)
            state = get_model_state_dict(model, options=options)  # a collective
            torch.save(state, path)
    Right:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)
        if dist.get_rank() == 0:
            torch.save(state, path)
    Fix: Read the stack of the rank that is named first: it raised, exited, or is not in the
    collective of the others.
    Source: huggingface/transformers PR#35234; pytorch#143536; measured on `sys.exit(7)` and
    `os._exit(0)`.
    """

    wants = "nothing"
    names_a_cause = False
    policies = (OnlyExplained(),)
    simulated = True

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        if run is None:
            return self.unknown(evidence.missing.get("train", "the script was not run"))
        if not run.completed:
            cause = root_cause(run)
            # A simulated rank has made-up numbers from the others, by which a right script may
            # stop.
            if run.role == "simulate":
                early = "the simulated run stopped early, which its made-up numbers may cause"
                return self.unknown(f"{early}: {cause.text}")
            return self.failed(cause.text, cause.location, fix=cause.fix)
        if run.steps() == 0:
            return self.unknown(f"the script ended: {without_steps(run)}")
        survey = evidence.survey
        # A survey run that reached its time limit, or that the verifier's own probe stopped, is no
        # failure of the script.
        if survey is not None and not (survey.completed or survey.timed_out or survey.probe_failed):
            cause = root_cause(survey)
            return self.failed(
                f"after the compared steps: {cause.text}", cause.location, fix=cause.fix
            )
        return self.passed(f"{count(run.world_size, 'rank')} made {count(run.steps(), 'step')}")
