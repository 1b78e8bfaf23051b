"""What rules of this family share."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from ...analysis.applicability import unsharded
from ...source.flow_queries import inner
from ...source.values import Value
from ...trace.events import Late, Step
from ..base import Event, Evidence, Finding, Flow, Rule, Run

NOT_USED = "the script never called fully_shard"
NO_STEP = "no optimizer step was seen"
ONE_RANK = "one rank reduces no gradients: give a larger --nproc"


class ShardedModelRule(Rule):
    """A rule on sharded models that passes only if the train run made optimizer steps."""

    wants: ClassVar[Literal["run", "models", "steps"]] = "models"

    def applies(self, evidence: Evidence) -> str:
        return unsharded(evidence.trained)

    def passed_with_steps(self, run: Run, evidence: str) -> Finding:
        """A pass; inconclusive if the run made no optimizer step."""
        return self.passed(evidence) if run.steps() else self.unknown(NO_STEP)


def gradients_differ(run: Run, name: str) -> bool:
    """Whether at some step the ranks that hold a plain parameter had different gradients of it."""
    for step in range(1, run.steps() + 1):
        # A parameter that one rank alone has has no copy whose gradient it should be reduced with
        # (experts of one rank (exam round 12 nd_11_expert_exchange)).
        values = [r.grads_at_step[name] for r in run.at_step(Step, step) if name in r.grads_at_step]
        if any(value != values[0] for value in values):
            return True
    return False


def late_parameters(run: Run) -> list[str]:
    """Parameters that were registered after their root was sharded."""
    return [name for record in run.places(Late) for name in record.names]


def given_a_sharded(flow: Flow, *functions: str) -> Iterator[Event]:
    """The calls of functions that are given a module that was sharded before."""
    given = ((event, event.arg(0, "module")) for event in flow.ops(*functions))
    return (e for e, model in given if model is not None and flow.sharded_by(model, e) is not None)


def called_on_sharded(flow: Flow, *methods: str) -> Iterator[Event]:
    """The calls of methods on a module that was sharded before."""
    return (
        e
        for e in flow.methods(*methods)
        if e.on is not None and flow.sharded_by(e.on, e) is not None
    )


def elements(container: Value) -> list[Value]:
    """The modules that a container was made of."""
    return [one for given in container.event.args for one in inner(given)]
