"""The runs of a window: the script, then DDP and one process from the state that it has reached
there, in the ways that worked for the first steps.
"""

from dataclasses import replace

from ..analysis.late_changes import seconds_of, windows
from ..analysis.precision import needs_full_precision
from ..config.windows import Window
from ..evidence import Evidence
from ..launch.planned import PlannedRun
from ..launch.processes import busy
from ..tolerances import MOST_WINDOWS, WINDOWS_SECONDS
from .oracles import in_one_process
from .settings import Settings


def windows_wanted(settings: Settings, first: Evidence) -> list[tuple[Window, str]]:
    """The windows to compare, each with why it is left out; "" if it is not.

    `first`: the evidence of the first steps. What nobody asked for is bounded in time.
    """
    target = settings.target
    if target.quick or first.train is None or not first.train.completed:
        return []
    if isinstance(target.windows, tuple):
        return [(window, "") for window in target.windows]
    if target.windows == "none":
        return []
    found, left, seconds = [], MOST_WINDOWS, WINDOWS_SECONDS * busy()
    for window in windows(first):
        takes = seconds_of(first, window)
        if not left or takes > seconds:
            why = f"it takes about {takes:.0f} s: --windows {window} compares it"
            found.append((window, why))
            continue
        left, seconds = left - 1, seconds - takes
        found.append((window, ""))
    return found


def not_to_be_skipped(settings: Settings) -> str:
    """Why no steps can be left out: only their samples show where they end; "" if they can."""
    known = settings.own_steps not in ("backwards", "forwards")
    return "" if known else "steps that only their samples separate cannot be left out"


def script(settings: Settings, first: Evidence) -> PlannedRun:
    """The script itself, without mixed precision and dropout if the first steps were."""
    target = settings.target
    probe = {"leave_starting_point": True, "full_precision": _exact(first)}
    given = "--save-args" if target.save_args else "the arguments after `--`"
    return settings.run("train", target.nproc, *target.save_args, given=given, probe=probe)


def others(settings: Settings, first: Evidence) -> list[PlannedRun]:
    """DDP and one process, those of them that the first steps were compared with."""
    exact, course, found = _exact(first), first.course, []
    needs, reference, single = settings.needs, first.reference, first.single
    if "reference" in needs and reference is not None and reference.completed:
        way = course.ways[-1]
        probe = {"full_precision": exact, "by_hand": way == "manual"}
        mode = "alone" if way == "alone" else "ddp"
        found.append(settings.run("reference", settings.target.nproc, mode=mode, probe=probe))
    if "single" in needs and single is not None and single.completed:
        one = in_one_process(settings, exact, course.single_ways[-1])
        found.append(replace(one, arguments=(*one.arguments, *(course.batch or ()))))
    return found


def nudged(oracle: PlannedRun) -> PlannedRun:
    """An oracle again, from weights one unit in the last place away: the measure of noise."""
    return replace(oracle, role="perturbed", probe={**oracle.probe, "nudge": True})


def _exact(first: Evidence) -> bool:
    return first.train is not None and needs_full_precision(first.train)
