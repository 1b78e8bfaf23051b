"""Starts the guard in this process, once torch is there. Imports no torch itself."""

import os
import sys
from types import ModuleType

from ..probe.imports import after_import
from .settings import OFF, VARIABLE, Settings, from_environment

_PROBE = f"{__name__.split('.')[0]}.verifier.probe.rank"  # there in a verification
_begun: list[bool] = []


def begin(unless_asked: Settings | None = None) -> None:
    """Watch this process if the environment asks for it, or else with the settings that are given.

    In a verification the script is watched already, and a launcher's own process never steps.
    """
    if _begun or _PROBE in sys.modules or os.environ.get(VARIABLE) == OFF:
        return
    try:
        settings = from_environment() or unless_asked
    except ValueError as error:
        _say(f"{error}; the run goes on without a guard")
        return
    if settings is None:
        return
    _begun.append(True)

    def start(module: ModuleType) -> None:
        try:
            from .watch import Guard

            Guard(settings).install()
        except Exception as error:
            _say(f"cannot start, the run goes on without it: {type(error).__name__}: {error}")

    if "torch" in sys.modules and hasattr(sys.modules["torch"], "__version__"):
        start(sys.modules["torch"])
    else:
        after_import("torch", start)


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"fsdp2 guard: {text}", file=sys.stderr, flush=True)
