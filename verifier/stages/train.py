"""The runs that come first: the whole script, and the steps that all others are compared with."""

from typing import Any

from ..analysis.checkpoints import saved_paths, saves_after
from ..evidence import Evidence
from ..launch.capacity import PER_NODE
from ..launch.planned import PlannedRun
from ..launch.processes import busy
from ..rules import RULES
from ..rules.base import lines_to_reach
from ..tolerances import SIMULATED_STEPS, SURVEY_SECONDS
from ..trace.roles import OF_CHECKPOINTS
from .settings import Settings, trained

SURVEYED = "starting_point.survey"


def survey(settings: Settings, evidence: Evidence) -> list[PlannedRun]:
    """The whole script, as far as its time allows: it says how many steps are worth comparing, and
    what no run reaches.
    """
    target = settings.target
    if target.steps or target.quick or evidence.survey is not None or evidence.train is not None:
        return []
    limit = min(SURVEY_SECONDS * busy(), target.timeout)
    fields = {"mode": "survey", "weights": SURVEYED, "timeout": limit, "optional": True}
    fields |= {"probe": {"leave_starting_point": True}}
    given = "--save-args" if target.save_args else "the arguments after `--`"
    expected = f"it is ended after {limit:.0f} s"
    return [
        settings.run(
            "survey", target.nproc, *target.save_args, given=given, expected=expected, **fields
        )
    ]


def first(settings: Settings, evidence: Evidence) -> list[PlannedRun]:
    """The train run, which saves its initial weights for the others; in the simulated tier, one
    process that acts as rank 0.
    """
    target = settings.target
    if evidence.train is not None:
        return []
    if settings.tier == "simulate":
        own: dict[str, Any] = {"mode": "simulate"}
        if target.full_size:
            own = {
                "mode": "capacity",
                "starting_point": False,
                "probe": {"structure": True, "per_node": PER_NODE},
            }
        return [settings.run("simulate", target.nproc, steps=SIMULATED_STEPS, **own)]
    options: dict[str, Any] = {"leave_starting_point": True, "watch_saves": True}
    if lines := lines_to_reach(evidence, (RULES[name] for name in settings.chosen)):
        options["lines"] = lines
    given = "--save-args" if target.save_args else "the arguments after `--`"
    fields = {"files": "empty", "keeps": True, "given": given, "probe": options}
    return [settings.run("train", target.nproc, *target.save_args, **fields)]


def repeats(settings: Settings, evidence: Evidence) -> list[PlannedRun]:
    """The train run once more, ended after the save that is resumed from, where a later save would
    hide it.
    """
    train, after, target = evidence.train, settings.resumes_after(evidence), settings.target
    if (
        not trained(evidence)
        or evidence.course.repeat is not None
        or train is None
        or after is None
    ):
        return []
    if (
        not target.resume_args
        or not settings.needs & OF_CHECKPOINTS
        or not saves_after(train, after)
    ):
        return []
    if first := inspection(settings, evidence):
        return first  # the files of the train run, before they are those of another
    fields = {"steps": after, "files": "empty", "keeps": True, "starting_point": False}
    return [settings.run("repeat", target.nproc, *target.save_args, **fields)]


def inspection(settings: Settings, evidence: Evidence) -> list[PlannedRun]:
    """A process of its own opens whatever the train run has saved."""
    paths = saved_paths(evidence.train) if evidence.train is not None else []
    if "inspect" not in settings.needs or not paths or evidence.inspect is not None:
        return []
    return [
        settings.run(
            "inspect", 1, files="saved", opens=tuple(paths), arguments=(), starting_point=False
        )
    ]
