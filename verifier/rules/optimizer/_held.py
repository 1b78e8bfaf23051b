"""Parameters that an optimizer should hold and does not."""

from __future__ import annotations

from ...analysis.wording import count, some
from ...evidence import Evidence
from ...finding import Finding
from ...trace import Run
from ...trace.events import Optimizer, Step, Stepped
from ..base import Rule


def judge_held(rule: Rule, evidence: Evidence, after_forward: bool) -> Finding:
    run = evidence.trained
    record = run.at_step(Step, 1)[0]
    firsts = [r for r in run.traces[0].of(Step) if r.step == 1]
    number = next((r.optimizer for r in firsts if r.strangers), run.traces[0].first_optimizer)
    built = next((r for r in run.traces[0].of(Optimizer) if r.number == number), None)
    missing = _missing(run, record.held, record.strangers)
    if not missing and not record.held:
        return rule.unknown("the optimizer holds no parameter of a model that was seen")
    if not missing or (built is not None and built.after_forward) is not after_forward:
        return rule.passed(f"the optimizer holds {count(len(record.held), 'parameter')} of the model")
    still = [n for n in missing if all(_unmoved(run, n, step) for step in range(1, run.steps() + 1))]
    when = "after a forward" if after_forward else "before the model was sharded"
    return rule.failed(
        f"the optimizer was built {when}: {len(missing)} of {len(run.parameters)} parameters ({some(missing)}) are not the "
        f"tensors that it holds, and {len(still)} of them did not change in {count(run.steps(), 'step')}",
        built.at_line if built is not None else None,
    )


def _missing(run: Run, held: list[str], strangers: list[list[int]]) -> list[str]:
    """Trainable parameters that no optimizer holds, while it holds a tensor of the same shape that is in no model."""
    shapes = {tuple(shape) for shape in strangers}
    everywhere = {n for r in run.traces[0].of(Step) if r.step == 1 for n in r.held} | set(held)
    return [
        name
        for name, entries in run.parameters.items()
        if entries[0].trainable and name not in everywhere and tuple(entries[0].shape) in shapes
    ]


def _unmoved(run: Run, name: str, step: int) -> bool:
    return all(r.moved.get(name, [0.0])[0] == 0.0 for r in run.at_step(Stepped, step))
