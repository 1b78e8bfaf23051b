"""Queries on the sources that several detectors on precision use."""

from __future__ import annotations

from .events import Event, Flow
from .looks import FULL, LOW_DTYPES, is_dtype
from .values import Value, holders

POLICY = "fsdp.MixedPrecisionPolicy"


_CASTS = {"bfloat16": True, "half": True, "float": False, "double": False}


def cast_of(event: Event) -> bool | None:
    """Whether a method call casts to low (True) or full (False) precision; None if it does not cast, or it is not known."""
    if event.method in _CASTS and not event.args:
        return _CASTS[event.method]
    if event.method == "to":
        for value in event.given():
            if is_dtype(value, LOW_DTYPES) or is_dtype(value, FULL):
                return is_dtype(value, LOW_DTYPES)
    return None


def policies_of_trained(flow: Flow) -> list[Value]:
    """The policies with which models that an optimizer holds are sharded."""
    pairs = [(v, m) for e, m in flow.shards if (v := e.kwargs.get("mp_policy")) is not None]
    return [policy for policy, module in pairs if any(id(h) in flow.trained for h in holders(module))]
