"""Queries on the sources that several detectors on initialisation use."""

from __future__ import annotations

from collections.abc import Iterator

from .events import Event, Flow
from .looks import is_known, made_by
from .values import Value


def _certainly_meta(event: Event) -> bool:
    devices = [made_by(context, "torch.device") for context in event.withs]
    return any(d is not None and d.args and d.args[0].const == "meta" for d in devices)


def emptied(flow: Flow) -> Iterator[tuple[Event, Value]]:
    """(to_empty, the known model made on meta that it is called on)."""
    for event in flow.methods("to_empty"):
        model = event.on
        if model is not None and is_known(flow, model) and _certainly_meta(model.event) and flow.certain:
            yield event, model
