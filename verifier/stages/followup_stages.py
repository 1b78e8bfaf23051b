"""Runs that are made where others differ: how far rounding goes, where the whole script ends, and
what scales gradients.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..analysis.comparison import loss_apart
from ..analysis.ending import both_end, comparable_end, last_step, weights_apart
from ..analysis.precision import needs_full_precision
from ..analysis.why_not_run import missing, no_damage
from ..evidence import NOT_QUICK, Evidence
from ..finding import Finding
from ..launch.planned import PlannedRun
from ..launch.processes import busy
from ..rules import RULES
from ..rules.policies import BesideTheWeights
from ..tolerances import LAYERS_FROM, SAME_END, SURVEY_SECONDS
from ..trace.roles import AFTER_TRAIN, QUICK
from .oracles import in_one_process
from .settings import Settings, trained
from .train import SURVEYED

Found = Callable[[str], Finding]  # what a rule finds in the runs so far


# No difference to judge: its noise need not be known.
SETTLED = ("pass", "not_covered", "not_applicable")


def completed(settings: Settings, evidence: Evidence) -> Evidence:
    """The evidence with the reasons for runs that were not made, without faults that decide
    nothing.
    """
    target, train = settings.target, evidence.train
    if train is None or not trained(evidence):
        what = (
            "did not complete (see run-completes)"
            if train is not None and not train.completed
            else "made no step"
        )
        found = dict.fromkeys(AFTER_TRAIN, f"the train run {what}")
    else:
        needs = {role for name in settings.chosen for role in RULES[name].needs}
        unmade = dict.fromkeys(needs - QUICK, NOT_QUICK) if target.quick else {}
        reshards = bool(target.reshard_to) or "reshard" not in settings.needs
        found = missing(evidence, target.resume_args, settings.steps, reshards, unmade)
    evidence = replace(evidence, missing=found)
    return replace(evidence, crashes=(), damaged=()) if no_damage(evidence) else evidence


def perturbed(settings: Settings, evidence: Evidence, found: Found) -> list[PlannedRun]:
    """The reference once more, from weights one unit in the last place away, where a difference
    needs its noise as a tolerance.
    """
    train, course = evidence.train, evidence.course
    if (
        not trained(evidence)
        or train is None
        or evidence.perturbed is not None
        or "perturbed" not in settings.needs
    ):
        return []
    rules = map(RULES.__getitem__, settings.chosen)
    deciding = [rule.name for rule in rules if "perturbed" in rule.needs | rule.reads]
    if all(found(rule).status in SETTLED for rule in deciding):
        return []
    options = {
        "full_precision": needs_full_precision(train),
        "nudge": True,
        "by_hand": "manual" in course.ways,
    }
    # the noise of one process is the measure
    if evidence.reference is not None and not evidence.reference.completed:
        one = in_one_process(
            settings,
            options["full_precision"],
            course.single_ways[-1] if course.single_ways else "ddp",
        )
        return [replace(one, role="perturbed", probe=options | {"by_hand": False})]
    mode = "alone" if course.ways[-1:] == ("alone",) else "ddp"
    return [settings.run("perturbed", settings.target.nproc, mode=mode, probe=options)]


def endings(settings: Settings, evidence: Evidence, found: Found) -> list[PlannedRun]:
    """All steps in one process, where the survey shows what the script prints or writes behind
    them; where it differs, its noise.
    """
    target, course = settings.target, evidence.course
    comparable = comparable_end(evidence) or (
        both_end(evidence) and _fails(found("matches-single-process"))
    )
    if "ending" not in settings.needs or evidence.ending_perturbed is not None or not comparable:
        return []
    words = (*target.save_args, *target.single_args, *(course.batch or ()))
    limit = min(2 * SURVEY_SECONDS * busy(), target.timeout)
    fields: dict[str, Any] = {
        "mode": course.single_ways[-1],
        "weights": SURVEYED,
        "timeout": limit,
        "optional": True,
    }
    fields["expected"] = f"it is ended after {limit:.0f} s"
    if evidence.ending is None:
        return [settings.run("ending", 1, *words, probe={"ending": True}, **fields)]
    if not _fails(found("ending-same-in-one-process")):
        return []
    # What is drawn behind the last step is noise too: the repeat draws other numbers there.
    probe = {"ending": True, "nudge": True, "reseed_after": last_step(evidence)}
    return [settings.run("ending_perturbed", 1, *words, probe=probe, **fields)]


def to_the_end(settings: Settings, evidence: Evidence, found: Found) -> list[PlannedRun]:
    """Resumes once more, to the end of the script, where their first steps differ: perhaps these
    were only counted otherwise.

    Those on other ranks one after the other, as long as each ends with the same weights.
    """
    target, survey, ends = settings.target, evidence.survey, evidence.resharded_endings
    if survey is None or not survey.completed:
        return []
    fields = {"mode": "survey", "files": "saved", "starting_point": False, "optional": True}
    rules = [rule for name in settings.chosen if (rule := RULES[name]).about_checkpoints]
    failed = [rule for rule in rules if _fails(found(rule.name))]
    due = []
    if evidence.resumed_ending is None and any(
        r.about_the_resume and not r.policy(BesideTheWeights) for r in failed
    ):
        due.append(settings.run("resumed_ending", target.nproc, *target.resume_args, **fields))
    # One resume that ends elsewhere decides: the others need not be run to the end.
    same = all(weights_apart(evidence, run) <= SAME_END for run in ends)
    if same and len(ends) < len(evidence.reshards) and RULES["reshard-keeps-trajectory"] in failed:
        world, words = (
            evidence.reshards[len(ends)].world_size,
            (*target.resume_args, *target.reshard_args),
        )
        due.append(settings.run("resharded_ending", world, *words, **fields))
    return due


def scaled(settings: Settings, evidence: Evidence, found: Found) -> list[PlannedRun]:
    """One step, each call of which is looked at, where gradients have a factor: which function
    scales them behind the backward?
    """
    rule = "double-or-missing-world-scale"
    if evidence.scaled is not None or rule not in settings.chosen or not _fails(found(rule)):
        return []
    words = settings.target.save_args
    return [
        settings.run(
            "scaled", settings.target.nproc, *words, steps=1, optional=True, probe={"scales": True}
        )
    ]


def layers(settings: Settings, evidence: Evidence, found: Found) -> list[PlannedRun]:
    """One step with fully_shard and with DDP, whose losses differ: which module is the first that
    computes otherwise?
    """
    rule, run, oracle = "matches-ddp", evidence.full_precision, evidence.reference
    if evidence.layers is not None or rule not in settings.chosen or run is None or oracle is None:
        return []
    if (
        not (run.completed and oracle.completed and _fails(found(rule)))
        or loss_apart(run, oracle, 1) <= LAYERS_FROM
    ):
        return []
    probe = {"layers": True, "full_precision": needs_full_precision(run)}
    manual = {"by_hand": True} if "manual" in evidence.course.ways else {}
    mode = "alone" if evidence.course.ways[-1:] == ("alone",) else "ddp"
    nproc, fields = settings.target.nproc, {"steps": 1, "optional": True}
    return [
        settings.run("layers", nproc, probe=probe, **fields),
        settings.run("layers_reference", nproc, mode=mode, probe=probe | manual, **fields),
    ]


def _fails(finding: Finding) -> bool:
    return finding.status == "fail" and finding.required
