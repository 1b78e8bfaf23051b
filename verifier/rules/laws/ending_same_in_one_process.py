from ...analysis.ending import Ended, comparable_end, ended, same_models
from ...analysis.limits import times_noise
from ...tolerances import ENDING, MULTIPLE, PRINTED
from ...trace.events import Printed, Written
from ..base import Evidence, Finding, Run, Uncovered, count
from ._one_process import OneProcessRule

END = "what follows the training loop"


class EndingSameInOneProcess(OneProcessRule):
    """What a script prints and writes after its training loop is the same on N ranks and in one
    process.

    Why: a final evaluation, a restored best model, a merge or an export happens once, after the
    last step that any oracle compares. A wrong one leaves losses, gradients and checkpoints right,
    and delivers a wrong model.
    Wrong:
        export = {}
        for name, weight in model.state_dict().items():
            scale = weight.to_local().abs().amax() / 127  # of this rank's rows
            export[name] = (weight.full_tensor() / scale).round()
    Right:
        export = {}
        for name, weight in model.state_dict().items():
            whole = weight.full_tensor()
            scale = whole.abs().amax() / 127
            export[name] = (whole / scale).round()
    Fix: Compute what is reported and exported from whole tensors, and from sums over the samples of
    all ranks; restore a model in place, outside of `summon` or `unshard` regions whose changes are
    dropped.
    Source: law L10: rank 0's `print` and `logging` calls and the files written after the last step
    of the survey run are compared with those of one process that makes all steps from the same
    weights.
    """

    names_a_cause = False
    needs = OneProcessRule.needs | {"ending"}
    reads = frozenset({"ending_perturbed"})

    def applies(self, evidence: Evidence) -> str:
        survey = evidence.survey
        if survey is None:
            return Uncovered("no survey run (--steps or --quick): no run made all steps", END)
        if not survey.completed:
            return Uncovered("the script's end was not reached in the survey run", END)
        if not survey.all(Printed) and not survey.all(Written):
            return "nothing is printed or written as a tensor behind the last step"
        # One process that parts at a kink by rounding ends elsewhere rightly: its end is no oracle
        # (exam round 9 hd_08_lora_ema twin).
        if evidence.kink is not None:
            last = evidence.kink - 1
            reason = f"one process is compared up to step {last} only: see matches-single-process"
            return Uncovered(reason, END)
        if not comparable_end(evidence):
            reason = "one process does not make the same first steps, or not in full precision"
            return Uncovered(reason, END)
        if evidence.ending is None or not evidence.ending.completed:
            reason = "one process did not come to the script's end in its time"
            return evidence.missing.get("ending", Uncovered(reason, END))
        # The first run may train a teacher and write it to a file which later runs load: then the
        # survey run called other models than one process, and the ends are not comparable.
        if not same_models(survey, evidence.ending):
            reason = (
                "the survey run called other models than one process, as where the first run makes"
                " a file for later ones"
            )
            return Uncovered(reason, END)
        return ""

    def compare(self, evidence: Evidence, run: Run, single: Run) -> Finding:
        survey, ending = evidence.survey, evidence.ending
        assert survey is not None
        assert ending is not None
        noise: dict[str, float] = {}
        again = evidence.ending_perturbed
        for one in ended(evidence, again, ending) if again is not None else ():
            noise[one.key] = max(noise.get(one.key, 0.0), one.apart)
        times = evidence.times(self.name)
        # A training that multiplies rounding (LoRA with alpha 200) ends as many times its noise
        # apart as the compared steps are: the limit grows by that factor (a right LoRA with
        # alpha 200).
        multiple = MULTIPLE * times_noise(evidence, run, single)
        compared = list(ended(evidence, survey, ending))
        for one in compared:
            least = PRINTED if one.shown else ENDING
            # A printed number has only the digits that it shows: half a unit of its last digit is
            # no difference.
            limit = times * max(least, multiple * noise.get(one.key, 0.0)) + one.rounded
            if one.apart > limit:
                return self._differs(one, limit, survey.world_size)
        if not compared:
            reason = "nothing that is printed or written behind the last step is comparable"
            return self.unknown(Uncovered(reason, END))
        return self.passed(
            f"{count(len(compared), 'value')} printed or written behind the last step are those of"
            " one process"
        )

    def _differs(self, one: Ended, limit: float, ranks: int) -> Finding:
        where = (
            f"on {ranks} ranks, and {one.shown} in one process"
            if one.shown
            else "differs from that of one process"
        )
        text = f"behind the last step: {one.what} {where}, from the same weights and samples"
        return self.failed(
            f"{text} ({one.apart:.2g} apart, allowed: {limit:.1g})",
            one.line,
            measured=one.apart,
            limit=limit,
        )
