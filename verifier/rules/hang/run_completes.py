from ...analysis.applicability import without_steps
from ...analysis.platform import another_number_of_ranks
from ...analysis.root_cause import is_victim, root_cause
from ...analysis.swallowed_errors import Swallowed, last_error, swallowed
from ..base import Evidence, Finding, Rule, Run, count
from ..policies import OnlyExplained

# A rank that has left the training looks like a rank that took another branch, or has less data.
_SEEN_AS = ("rank-conditional-collective", "rank-local-control-flow", "uneven-batches-hang")


class RunCompletes(Rule):
    """Every rank reaches the end of the run: none crashes, hangs, is killed or exits early, and
    none catches the error that ends its training.

    Why: a collective that only some ranks call waits for ever, and launchers name the wrong rank:
    torchrun always exits 1 and reports the rank that it stopped itself when another exited
    silently. A script that catches the error of a step outside its training loop, prints it and
    goes on saves weights that are not trained to the end, and exits with status 0. So does one
    whose reading thread dies of an error that nobody asks its future for.
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
        caught = swallowed(evidence.survey, evidence.sources)
        crashed = any(_crashed(one) for one in (run, evidence.survey) if one is not None)
        if caught is not None and caught.missing and not caught.doubt and not crashed:
            return self._swallowed(caught, evidence.survey)
        if not run.completed:
            cause = root_cause(run)
            if reason := another_number_of_ranks(run):
                return self.unknown(reason)
            # A simulated rank has made-up numbers from the others, by which a right script may
            # stop.
            if run.role == "simulate":
                early = "the simulated run stopped early, which its made-up numbers may cause"
                return self.unknown(f"{early}: {cause.text}")
            return self.failed(cause.text, cause.location, fix=cause.fix)
        if run.steps() == 0:
            error = last_error(evidence.survey, evidence.sources)
            more = f"; {error}" if error else ""
            return self.unknown(f"the script ended: {without_steps(run)}{more}")
        survey = evidence.survey
        # A survey run that reached its time limit, or that the verifier's own probe stopped, is no
        # failure of the script.
        if survey is not None and not (survey.completed or survey.timed_out or survey.probe_failed):
            cause = root_cause(survey)
            return self.failed(
                f"after the compared steps: {cause.text}", cause.location, fix=cause.fix
            )
        if caught is not None:
            what = f": {caught.missing}" if caught.missing else ""
            why = caught.doubt or "no loop shows that steps are missing"
            return self.unknown(f"{caught.text}{what}; {why}", location=caught.raised)
        return self.passed(f"{count(run.world_size, 'rank')} made {count(run.steps(), 'step')}")

    def _swallowed(self, error: Swallowed, survey: Run | None) -> Finding:
        again = (
            "let the training see it (`future.result()`, or the error in the queue)"
            if error.in_thread
            else "raise it again where it is caught"
        )
        fix = (
            f"Fix the error at that line, and {again}, so that the launcher stops all ranks and the"
            " script does not end with status 0."
        )
        waited = survey is not None and survey.timed_out and not error.everywhere
        text = f"{error.text}: {error.missing}{'; the others waited for it' if waited else ''}"
        return self.failed(text, error.raised, fix=fix, explains=_SEEN_AS)


def _crashed(run: Run) -> bool:
    """Whether a rank died of an error of its own, or of an exit code."""
    ends = (trace.end for trace in run.traces if not is_victim(trace))
    return any(
        end.how == "exception" or (end.how == "sys.exit" and end.code) for end in ends if end
    )
