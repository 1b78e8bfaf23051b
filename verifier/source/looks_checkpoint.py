"""Queries on the sources that several detectors on checkpoints use."""

from __future__ import annotations

from .events import Event
from .looks import is_const, made_by
from .values import Value

GETTERS = ("dsd.get_model_state_dict", "dsd.get_state_dict", "dsd.get_optimizer_state_dict")
SETTERS = ("dsd.set_model_state_dict", "dsd.set_state_dict", "dsd.set_optimizer_state_dict")
SAVES = ("dcp.save", "dcp.async_save")


def options_of(event: Event) -> Event | None:
    return made_by(event.kwargs.get("options"), "dsd.StateDictOptions")


def has_option(options: Event | None, name: str) -> bool:
    """Whether an option is surely on."""
    return options is not None and is_const(options.kwargs.get(name), True)


def state_given(event: Event) -> Value | None:
    return event.arg(0, "state_dict")
