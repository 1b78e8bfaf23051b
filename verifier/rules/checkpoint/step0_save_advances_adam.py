from ...evidence import LOADS, Evidence
from ...source.events import Flow, covers
from ...source.flow_queries import GETTERS, SAVES, SETTERS, steps_of, text
from ...source.values import reach
from ...trace import Trace
from ...trace.events import Checkpoint, Place, Step, Template
from ..base import Finding, Hits, Rule, Run, count, some
from ..policies import JudgesExports
from ._resumed import keeps_no_state

_FIX = "Take, load and set the optimizer's state only where the checkpoint has it."


class Step0SaveAdvancesAdam(Rule):
    """Adam's step counter equals the number of optimizer steps.

    Why: torch's state-dict helpers create missing optimizer state by a step with zero gradients,
    which sets its counter to 1. A save (or an unfilled load template) before the first step makes
    Adam's first update 1.34 times too small.
    Wrong:
        optimizer = torch.optim.AdamW(shard(model).parameters(), lr=1e-3)
        state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=path)  # before any step
    Right:
        optimizer = torch.optim.AdamW(shard(model).parameters(), lr=1e-3)
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=path)
    Fix: Do not take the optimizer's state before its first step, or set `state["step"]` back to 0
    afterwards.
    Source: measured: 1.34 times; the same in NVIDIA/Megatron-LM#5974, PR#5976.
    """

    policies = (JudgesExports(),)
    reads = frozenset({"resume"})
    explains = ("resume-is-exact",)

    def applies(self, evidence: Evidence) -> str:
        run = evidence.trained
        if _after_resume(evidence):
            return ""
        if _ahead(run):
            loads = any(
                r.op in LOADS and r.seq < run.traces[0].steps[0].seq for r in run.places(Checkpoint)
            )
            # Counters above 0 before the first step are right where a checkpoint was loaded.
            return "the train run loads a checkpoint before its first step" if loads else ""
        return super().applies(evidence) or keeps_no_state(run, "step")

    def unseen(self, evidence: Evidence) -> str:
        shown = _ahead(evidence.trained) or _after_resume(evidence)
        return "" if shown else super().unseen(evidence)

    def judge(self, evidence: Evidence) -> Finding:
        if (resumed := _after_resume(evidence)) is not None:
            line, number, ahead = resumed
            what = f"after the resume the step counter of {count(len(ahead), 'parameter')}"
            one = f"{next(iter(ahead.values())):g} before step {number}"
            return self.failed(f"{what} ({some(ahead)}) is {one}, and 0 without it", line, fix=_FIX)
        trace = evidence.trained.traces[0]
        first, ahead = next((pair for pair in _firsts(trace) if pair[1]), (trace.steps[0], {}))
        if not ahead:
            return self.passed("the step counters are 0 before the first step")
        line = next((r.at_line for r in _templates(trace) if r.seq < first.seq), first.at_line)
        which = f"{count(len(ahead), 'parameter')} ({some(ahead)})"
        counted = f"{next(iter(ahead.values())):g}"
        before = "the first step" + (f" of {first.cls}" if first.optimizer else "")
        return self.failed(f"the step counter of {which} is {counted} before {before}", line)

    def detect(self, flow: Flow) -> Hits:
        """The optimizer's state is saved before the first step, in any case."""
        steps = steps_of(flow)
        for event in flow.ops(*GETTERS[1:]):
            adam = [
                o
                for o, _ in flow.optimizers
                # Adam, AdamW, Adamax, Adagrad, Adadelta, Adafactor count steps in their state; SGD
                # does not.
                if o.result in event.args and o.op.startswith("torch.optim.Ada")
            ]
            loaded = any(covers(e, event) for e in flow.ops("dcp.load", "torch.load", *SETTERS))
            if (
                not adam
                or not steps
                or event.index > steps[0].index
                or event.on_some_ranks
                or event.loops
                or loaded
            ):
                continue
            saved = [
                e
                for e in flow.ops(*SAVES, "torch.save")
                if e.args and event.result in reach(e.args[0])
            ]
            if any(covers(event, e) and e.index < steps[0].index for e in saved):
                yield (
                    (
                        f"{text(event.node)} before the first step sets the optimizer's step"
                        " counter to 1"
                    ),
                    event,
                )


def _after_resume(evidence: Evidence) -> tuple[Place | None, int, dict[str, float]] | None:
    """(line that made the state, step, the counters) where the state of a resumed optimizer is
    that of torch's helper, and without the resume there is none: the checkpoint has none, as of a
    new stage (Megatron-Bridge#5680).
    """
    resume, after = evidence.resume, evidence.resumed_after()
    if resume is None or after is None:
        return None
    trace = resume.traces[0]
    mine, theirs = (
        next(iter(run.at_step(Step, number)), None)
        for run, number in ((resume, 1), (evidence.trained, after + 1))
    )
    made = next((r for r in _templates(trace) if mine is not None and r.seq < mine.seq), None)
    if mine is None or theirs is None or made is None or any(theirs.state.values()):
        return None
    counters = {name: entry.get("step") for name, entry in mine.state.items()}
    ahead = {n: v for n, v in counters.items() if isinstance(v, int | float) and v >= 1}
    return (made.at_line, after + 1, ahead) if ahead else None


def _ahead(run: Run) -> bool:
    """Whether steps are counted for some parameter before the first step of its optimizer."""
    return any(ahead for _, ahead in _firsts(run.traces[0]))


def _firsts(trace: Trace) -> list[tuple[Step, dict[str, float]]]:
    """(the first step of an optimizer, the steps that are counted before it by parameter, where
    there are any) of each.

    One that comes after the others may have got the state of another: its own counts if a
    state-dict helper has made its state.
    """
    found: dict[int, tuple[Step, dict[str, float]]] = {}
    for record in trace.of(Step):
        # A later optimizer may have been given another one's state (phases): its count is wrong
        # only if torch's state-dict helper made its state, which steps it once (exam round 5
        # (optimizers that begin later)).
        made = record.optimizer == trace.first_optimizer or any(
            r.seq < record.seq for r in _templates(trace)
        )
        counters = {name: entry.get("step") for name, entry in record.state.items()} if made else {}
        ahead = {
            name: value
            for name, value in counters.items()
            # torch's helper makes the state by one step with zero gradients: Adam's counter is then
            # 1 before the first step, and its bias correction is off by one (fault
            # step0_save_advances_adam.yaml).
            if isinstance(value, int | float) and value >= 1
        }
        found.setdefault(record.optimizer, (record, ahead))
    return list(found.values())


def _templates(trace: Trace) -> list[Template]:
    """The states that state-dict helpers took from optimizers that had none."""
    return [r for r in trace.of(Template) if r.optimizers and not r.had_state]
