from ...trace.events import Scheduled
from ...trace.recorded import unused
from ..base import Evidence, Finding, Rule, Run, count, some


class ScheduleOfReplacedOptimizer(Rule):
    """A learning-rate schedule moves an optimizer that steps.

    Seen: the logged learning rate decays, and the steps are as large as at first, from the line on
    at which the optimizer was built again
    Why: a schedule holds the optimizer that it was built with. Where a script builds another one,
    for more parameters after a warm-up, the schedule goes on with the old one: what it logs is the
    rate that nothing uses, and the new optimizer keeps the rate that it was built with.
    Wrong:
        optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Right:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=16)
    Fix: Build the schedule again with the new optimizer (`last_epoch` says where it goes on), or
    keep one optimizer and add the new parameters by `optimizer.add_param_group`.
    Source: RLinf/RLinf PR#1359. The schedule's optimizer makes no step any more, its learning rates
    change, and the optimizers that step parameters of it have no schedule and keep their rates.
    """

    reads = frozenset({"survey"})

    def applies(self, evidence: Evidence) -> str:
        run = evidence.survey or evidence.trained
        return super().applies(evidence) or (
            "" if run.all(Scheduled) else "no schedule of torch was stepped"
        )

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.survey or evidence.trained
        record = next((one for one in run.all(Scheduled) if unused(one)), None)
        if record is None:
            return self.passed("no schedule goes on after the last step of its optimizer")
        name = record.cls.rpartition(".")[2]
        others = some([one.rpartition(".")[2] for one in record.others])
        text = (
            f"{name} is stepped {record.idle} times after its optimizer's last step (of"
            f" {count(record.made, 'step')}) and sets its learning rate to"
            f" {some(_numbers(record.lr))}; {others} steps the same parameters with"
            f" {some(_numbers(record.lr_of_others))} (expected: the schedule's)"
        )
        # An optimizer that steps again after the last step that was seen is not replaced.
        return self.failed(text, record.at_line, required=not _cut(run))


def _cut(run: Run) -> bool:
    """Whether the run was stopped before the script's end."""
    return any(trace.end is not None and trace.end.how == "stopped" for trace in run.traces)


def _numbers(values: list[float]) -> list[str]:
    return list(dict.fromkeys(f"{value:.4g}" for value in values))
