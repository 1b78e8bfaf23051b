from collections import Counter

from ...analysis.state_after_resume import beginning, learning_rates
from ...analysis.unusual_parallelism import resumable, saved_in_a_step
from ...source.events import ITERATE
from ...source.flow_queries import GETTERS, SAVES, names_in, text
from ...source.values import Value, reach
from ...trace.events import Batch, Step
from ..base import Evidence, Finding, Flow, Hits, Run, count, some
from ..policies import ShownBy
from ._resumed import ResumeRule, load_line, saved_at

_RATE = (
    "Restore the optimizer's param_groups too: load its whole state dict, or set each group's `lr`"
    " from `scheduler.get_last_lr()`."
)

_AHEAD = (
    "Let nothing take batches between the load and the first step: make the iterator once, and save"
    " the position of what was trained on, not of what was read ahead."
)

_DRAWN = (
    "Save and restore the data position, and the state of each rank's random generators if samples"
    " are drawn, masked or noised with them; or draw from a generator that is seeded by the"
    " sample's number."
)


class SchedulerOrProgressNotRestored(ResumeRule):
    """After a resume the learning rate and the data continue where they stopped.

    Why: with a checkpoint of model and optimizer alone, the schedule starts again (a second
    warm-up, a jump of the learning rate), and so does the data: some samples are seen twice, others
    never.
    Wrong:
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.save(state, checkpoint_id=path)
    Right:
        state = {"model": model_state, "optimizer": optimizer_state}
        state |= {"scheduler": scheduler.state_dict(), "samples": samples_seen}
        dcp.save(state, checkpoint_id=path)
    Fix: Save and restore the scheduler's state_dict, the step and the data position (in global
    samples) too; shuffle for the loaded epoch.
    Source: pytorch/torchtitan PR#275, #809; Modalities/modalities#315; pytorch#119168.
    """

    policies = (ShownBy("resume-is-exact"),)

    def compare(self, evidence: Evidence, saved: list[Step], resumed: list[Step]) -> Finding:
        resume, step = evidence.resume, saved[0].step
        assert resume is not None
        # An own L-BFGS ends its step with a backward before the save: its records are shifted by
        # that backward (exam round 10 kd_15_seismic_lbfgs_inversion).
        train = resumable(evidence.trained, step - 1)
        # A save in mid-step: the resumed run's first step is the rest of one, with the other
        # micro-batches (exam round 6 t_15_token_budget).
        if reason := saved_in_a_step(evidence):
            return self.not_applicable(reason)
        rate, fix = _other_rate(train, resume, step)
        others = _other_samples(train, resume, step)
        if others and (ahead := _steps_ahead(evidence, resume, step)):
            others += f": on those of step {step + ahead}, so those of {count(ahead, 'step')}"
            others += f" from step {step} on are left out"
            fix = fix or _AHEAD
        elif others and _other_draws(train, resume, step):
            others += "; the default random generator is in another state there, too"
            fix = fix or _DRAWN
        if others and (begins := beginning(evidence, train, resume, step)).lost:
            others += f"; it begins there with {some(begins.lost, 2)}"
        wrong = [what for what in (rate, others) if what]
        if wrong:
            more = {"fix": fix} if fix and len(wrong) == 1 else {}
            return self.failed("; ".join(wrong) + saved_at(evidence), load_line(evidence), **more)
        rate = _list(resumed[0].lr)
        return self.passed(
            f"learning rate {rate} and the samples of step {step} are those of an uninterrupted run"
        )

    def detect(self, flow: Flow) -> Hits:
        """A schedule that is never saved, in a script that saves and loads its optimizer."""
        # A schedule that is built with last_epoch (or a step that was saved) is restored without
        # its state dict.
        if not flow.certain or names_in(flow, "last_epoch", "last_step"):
            return
        saves, loads = flow.ops(*SAVES, "torch.save"), flow.ops("dcp.load", "torch.load")
        whole = any(
            _is_optimizer_state(flow, part) for e in saves if e.args for part in reach(e.args[0])
        )
        if not saves or not loads or not whole:
            return
        for made in flow.matching(lambda name: name.startswith("torch.optim.lr_scheduler.")):
            steps = [e for e in flow.methods("step") if e.on is made.result]
            lists = {
                e.node
                for e in flow.ops(ITERATE)
                if any(part is made.result for part in reach(e.args[0]))
            }
            asked = flow.methods("state_dict", "load_state_dict")
            # Schedules in a list are saved in a loop over it: `[s.state_dict() for s in schedules]`
            # (linted right scripts of the exam).
            kept = any(e.on is made.result or lists & {*e.loops} for e in asked)
            held = any(made.result in e.args for e in flow.events if e.op not in ("", made.op))
            in_loop = len(steps) == 1 and steps[0].loops and not steps[0].caught
            if in_loop and not kept and not held and not flow.escapes(made.result):
                yield (
                    (
                        f"{text(made.node)}: the script saves and loads its optimizer, but not this"
                        " schedule"
                    ),
                    made,
                )


def _other_rate(train: Run, resume: Run, step: int) -> tuple[str, str]:
    """(which learning rate differs after the resume, in words; the fix if it is a special one)."""
    rates = learning_rates(train, resume, step)
    apart = [later for later, (mine, theirs) in enumerate(rates) if mine != theirs]
    if not apart:
        return "", ""
    mine, theirs = rates[apart[0]]
    what = (
        f"the learning rate of step {step + apart[0]} is {_list(mine)} after the resume,"
        f" {_list(theirs)} without"
    )
    if apart != [0] or len(rates) == 1:
        return what, ""
    again = (
        ", and right again in the next step: the schedule goes on, the optimizer's own rate is not"
        " restored"
    )
    return what + again, _RATE


def _other_samples(train: Run, resume: Run, step: int) -> str:
    """That the resumed run goes on with other samples, in words; "" if it does not."""
    # Every rank must have other samples: a rank whose own position alone is wrong is
    # resume-is-exact's.
    if any(a == b for a, b in zip(train.rows(step), resume.rows(1), strict=True)):
        return ""
    batch = resume.global_batch(1)
    again = next((k for k in range(1, train.steps() + 1) if train.global_batch(k) == batch), None)
    if again:
        return f"step {step} after the resume trains on the samples of step {again} once more"
    return f"step {step} after the resume trains on other samples than an uninterrupted run"


def _other_draws(train: Run, resume: Run, step: int) -> bool:
    """Whether the default generators are in another state at the first forward of the resume: what
    draws samples from them draws others (NVIDIA-NeMo/Automodel: the noise of a diffusion model).
    """
    pairs = zip(train.micros(step), resume.micros(1), strict=True)
    return any(mine and theirs and mine[0].random != theirs[0].random for mine, theirs in pairs)


def _steps_ahead(evidence: Evidence, resume: Run, step: int) -> int:
    """By how many steps the samples of a resume are ahead: a loader that is started twice takes
    the next ones each time (Lightning's fetcher); 0 where the survey run does not show it.
    """
    if evidence.survey is None:
        return 0
    taken: Counter[int] = Counter()  # by step, how many of these samples
    batch = resume.global_batch(1)
    for record in evidence.survey.all(Batch):
        taken[record.step] += sum(row in batch for row in record.rows)
    found = [number for number, rows in taken.items() if rows == batch.total() and number > step]
    return found[0] - step if len(found) == 1 else 0


def _list(values: list[float]) -> str:
    return ", ".join(f"{v:.6g}" for v in values)


def _is_optimizer_state(flow: Flow, part: Value) -> bool:
    if part.kind != "made" or part.event is None:
        return False
    own = part.name == "state_dict" and any(part.event.on is o.result for o, _ in flow.optimizers)
    return own or part.name in GETTERS[1:]
