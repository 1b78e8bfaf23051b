"""Parameters that an optimizer should hold and does not."""

from typing import ClassVar

from ...trace.events import Optimizer, Step, Stepped
from ..base import Evidence, Finding, Rule, count, some


class HeldRule(Rule):
    """A rule on an optimizer that holds other tensors than the model's parameters."""

    after_forward: ClassVar[bool]  # whether it is about an optimizer that is built after a forward
    built: ClassVar[str]

    def judge(self, evidence: Evidence) -> Finding:
        run, trace = evidence.trained, evidence.trained.traces[0]
        record = run.at_step(Step, 1)[0]
        firsts = [r for r in trace.of(Step) if r.step == 1]
        number = next((r.optimizer for r in firsts if r.strangers), trace.first_optimizer)
        built = next((r for r in trace.of(Optimizer) if r.number == number), None)
        shapes = {tuple(shape) for shape in record.strangers}
        held = {name for r in firsts for name in r.held}.union(record.held)
        others = [
            n for n, e in run.parameters.items() if e[0].trainable and tuple(e[0].shape) in shapes
        ]
        missing = [name for name in others if name not in held and name not in run.changed]
        if not missing and not record.held:
            # An optimizer may hold copies that the script writes back (charlm_host_adam).
            if run.changed:
                return self.passed(
                    f"the optimizer holds no parameter of the model, of which {len(run.changed)}"
                    " change"
                )
            return self.unknown("the optimizer holds no parameter of a model that was seen")
        # The two rules share the symptom; whether a forward came before the optimizer's
        # construction shows the cause (faults optim_before_shard.py, optim_built_after_forward.py).
        if not missing or (built is not None and built.after_forward) is not self.after_forward:
            return self.passed(
                f"the optimizer holds {count(len(record.held), 'parameter')} of the model"
            )
        changes = [
            r.moved for step in range(1, run.steps() + 1) for r in run.at_step(Stepped, step)
        ]
        still = sum(all(moved.get(name, [0.0])[0] == 0.0 for moved in changes) for name in missing)
        what = (
            f"it does not hold {len(missing)} of {len(run.parameters)} parameters of the model"
            f" ({some(missing)})"
        )
        text = (
            f"the optimizer was built {self.built}: {what}; {still} did not change in"
            f" {count(run.steps(), 'step')}"
        )
        return self.failed(text, built.at_line if built is not None else None)
