from collections.abc import Iterator

from ...evidence import Evidence
from ...finding import Finding, Hit
from ...source.events import Flow
from ...source.looks import names_in, text
from ...source.looks_checkpoint import GETTERS, SAVES
from ...source.registry import detector
from ...source.values import Value, reach
from ...trace.events import Step
from ..base import Rule
from ._resumed import NEEDS, first_steps, load_line, saved_at


class SchedulerOrProgressNotRestored(Rule):
    """After a resume the learning rate and the data go on where they stopped.

    Why: a checkpoint of model and optimizer alone restarts the schedule (a second warm-up, a learning rate that
    jumps) and the data: samples are seen twice, others never.
    Wrong:
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.save(state, checkpoint_id=path)
    Right:
        state = {"model": model_state, "optimizer": optimizer_state}
        state |= {"scheduler": scheduler.state_dict(), "samples": samples_seen}
        dcp.save(state, checkpoint_id=path)
    Fix: Save and restore the scheduler's state_dict, the step, and the data position (in global samples) with the
    model.
    Source: pytorch/torchtitan PR#275, #809; Modalities/modalities#315; pytorch#119168.
    """

    needs = NEEDS

    def judge(self, evidence: Evidence) -> Finding:
        pair = first_steps(evidence)
        if isinstance(pair, str):
            return self.unknown(pair)
        saved, resumed = pair
        train, resume = evidence.trained, evidence.resume
        assert resume is not None
        step = saved[0].step
        told = []
        for later in range(resume.steps()):
            mine_, theirs_ = resume.at_step(Step, 1 + later), train.at_step(Step, step + later)
            if mine_ and theirs_ and mine_[0].lr != theirs_[0].lr:
                now, then = _list(mine_[0].lr), _list(theirs_[0].lr)
                told.append(f"the learning rate of step {step + later} is {now} after the resume, {then} without")
                break
        theirs, mine = train.rows(step), resume.rows(1)
        if all(a != b for a, b in zip(theirs, mine, strict=True)):
            again = next(
                (k for k in range(1, train.steps() + 1) if train.global_batch(k) == resume.global_batch(1)), None
            )
            which = f"the samples of step {again} once more" if again else "other samples than an uninterrupted run"
            told.append(f"step {step} after the resume trains on {which}")
        if told:
            return self.failed("; ".join(told) + saved_at(evidence), load_line(evidence))
        return self.passed(
            f"learning rate {_list(resumed[0].lr)} and the samples of step {step}, as without the interruption"
        )


def _list(values: list[float]) -> str:
    return ", ".join(f"{v:.6g}" for v in values)


@detector("scheduler-or-progress-not-restored")
def scheduler_not_restored(flow: Flow) -> Iterator[Hit]:
    """A schedule that is saved by nobody, in a script that saves and loads its optimizer."""
    if not flow.certain or names_in(flow, "last_epoch", "last_step"):
        return
    saves, loads = flow.ops(*SAVES, "torch.save"), flow.ops("dcp.load", "torch.load")
    whole = any(_speaks_of_optimizer(flow, part) for e in saves for part in reach(e.args[0]) if e.args)
    if not saves or not loads or not whole:
        return
    for made in flow.matching(lambda name: name.startswith("torch.optim.lr_scheduler.")):
        steps = [e for e in flow.methods("step") if e.on is made.result]
        kept = [e for e in flow.methods("state_dict", "load_state_dict") if e.on is made.result]
        forward = any(e.caught or not e.loops for e in steps)
        held = any(made.result in e.args for e in flow.events if e.op not in ("", made.op))
        once = len({id(e.node) for e in steps}) == 1 and len(steps) == 1
        if once and not kept and not forward and not held and not flow.escapes(made.result):
            told = f"{text(made.node)}: the script saves and loads its optimizer, and never this schedule"
            yield flow.hit("scheduler-or-progress-not-restored", told, made)


def _speaks_of_optimizer(flow: Flow, part: Value) -> bool:
    if part.kind != "made" or part.event is None:
        return False
    own = part.name == "state_dict" and any(part.event.on is o.result for o, _ in flow.optimizers)
    return own or part.name in GETTERS[1:]
