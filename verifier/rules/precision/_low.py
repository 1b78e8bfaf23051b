"""Rules on groups that compute in low precision."""

from typing import ClassVar

from ...analysis.precision import LOW
from ...source.flow_queries import LOW_DTYPES, POLICY, is_dtype, policies_of_trained
from ...source.values import choices
from ...trace.events import Shard
from ..base import Event, Evidence, Flow, Rule, Run


def low_groups(run: Run, *dtypes: str) -> list[Shard]:
    """The calls of fully_shard with a param_dtype in `dtypes`, by default any low one."""
    return [record for record in run.places(Shard) if record.param_dtype in (dtypes or LOW)]


class LowRule(Rule):
    """A rule on the groups whose `param_dtype` is one of `dtypes`, by default any low one."""

    dtypes: ClassVar[tuple[str, ...]] = ()

    def applies(self, evidence: Evidence) -> str:
        there = not evidence.trained.models or low_groups(evidence.trained, *self.dtypes)
        return (
            "" if there else f"no group computes in {' or '.join(self.dtypes) or 'low precision'}"
        )


def low_policies_of_trained(flow: Flow, dtypes: tuple[str, ...] = LOW_DTYPES) -> list[Event]:
    """The policies with such a `param_dtype` with which models that an optimizer holds are
    sharded.
    """
    used = [one for value in policies_of_trained(flow) for one in choices(value)]
    low = [event for event in flow.ops(POLICY) if is_dtype(event.arg(0, "param_dtype"), dtypes)]
    return [event for event in low if event.result in used]
