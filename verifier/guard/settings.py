"""What the guard is asked to do: options of the command, or words of the environment variable.

Imports no torch: the command, and each process that a launcher starts, reads it.
"""

import os
import shlex
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

VARIABLE = "FSDP2_GUARD"
OFF = "off"  # as the value of the variable: no guard
ON_BREACH = ("warn", "stop", "checkpoint-and-stop")


@dataclass(frozen=True)
class Settings:
    """The options of a run. In the variable: `every=100 on-breach=warn out=run/guard.jsonl`."""

    every: int = 100  # steps between comparisons of all ranks
    repeat: int = 1  # comparisons between repeats of layers; 0: none
    hang: float = 300.0  # seconds without a sign of progress, at least, that are called a hang
    on_breach: str = "warn"
    out: str = "guard.jsonl"
    hook: str = ""  # a command that gets the breach as JSON on its input
    prometheus: str = ""  # a text file for the collector of node_exporter

    def words(self) -> str:
        """The options that differ from their defaults, as the variable holds them."""
        changed = (
            (one.name.replace("_", "-"), getattr(self, one.name))
            for one in fields(self)
            if getattr(self, one.name) != one.default
        )
        return " ".join(f"{name}={shlex.quote(str(value))}" for name, value in changed) or "on"


def read(words: str) -> Settings:
    """The settings that the variable gives. Raises ValueError with what is wrong and what to do."""
    given: dict[str, object] = {}
    known = {one.name.replace("_", "-"): one for one in fields(Settings)}
    for word in shlex.split(words):
        if word in ("on", "1"):
            continue
        name, found, value = word.partition("=")
        if not found or name not in known:
            near = get_close_matches(name, known, 1)
            instead = f"did you mean {near[0]!r}?" if near else f"it may set {', '.join(known)}"
            raise ValueError(f"{VARIABLE}: unknown {word!r}; {instead}")
        kind: Any = type(known[name].default)
        try:
            given[known[name].name] = kind(value)
        except ValueError:
            raise ValueError(f"{VARIABLE}: {name} is {value!r}, not a number") from None
    found_settings = Settings(**given)  # type: ignore[arg-type]
    _check(found_settings)
    return found_settings


def _check(settings: Settings) -> None:
    if settings.on_breach not in ON_BREACH:
        raise ValueError(
            f"on-breach is {settings.on_breach!r}; it is one of {', '.join(ON_BREACH)}"
        )
    if settings.every < 1:
        raise ValueError(f"every is {settings.every}; it is a number of steps, at least 1")
    if settings.repeat < 0 or settings.hang <= 0:
        raise ValueError("repeat is at least 0, and hang more than 0 seconds")


def from_environment() -> Settings | None:
    """The settings of this process; None if it has no guard."""
    words = os.environ.get(VARIABLE, "")
    return read(words) if words not in ("", OFF, "0") else None
