"""What one rule finds, and what becomes of it.

QUESTIONS are put to a rule until one answers: the answer is its finding. OF_ONE are then applied to
it, one after the other.
"""

from collections.abc import Callable
from dataclasses import replace

from ..analysis.ending import comes_to_the_same_end
from ..analysis.platform import NOT_HERE, beyond_cuda_on_cpu, not_installed, replicas_not_reduced
from ..analysis.root_cause import computing
from ..analysis.steps_to_compare import steps_differ
from ..analysis.wording import count
from ..evidence import Evidence
from ..finding import Finding
from ..rules.base import Rule, seen
from ..rules.policies import BesideTheWeights, OnlyOnCpu
from ..trace.events import End, ProbeError, Shard
from .passes import Pass

Question = Callable[[Rule, Evidence], Finding | None]
OfOne = Callable[[Rule, Evidence, Finding], Finding]

# Families of rules whose listeners keep their own errors to themselves: to these rules such an
# error looks like "nothing seen".
LISTENED = ("wrapping", "init", "mesh")


def caused_by_the_cpu(rule: Rule, evidence: Evidence) -> Finding | None:
    """Not applicable, where a script for GPUs was run with CUDA on the CPU."""
    here = evidence.cuda_on_cpu and rule.policy(OnlyOnCpu)
    return rule.not_applicable(NOT_HERE) if here else None


def too_short(rule: Rule, evidence: Evidence) -> Finding | None:
    """Inconclusive, where the train run has not recorded what the rule wants."""
    reason = rule.too_short(evidence)
    return rule.unknown(reason) if reason else None


def not_of_the_kind(rule: Rule, evidence: Evidence) -> Finding | None:
    """Not applicable, where the script has nothing that the rule is about."""
    reason = rule.applies(evidence)
    return rule.not_applicable(reason) if reason else None


def not_shown(rule: Rule, evidence: Evidence) -> Finding | None:
    """Inconclusive, where no run has shown what the script has."""
    reason = rule.unseen(evidence)
    return rule.unknown(reason) if reason else None


def what_it_finds(rule: Rule, evidence: Evidence) -> Finding | None:
    """The rule's own finding."""
    return rule.judge(evidence)


def ended_by_us(rule: Rule, evidence: Evidence, found: Finding) -> Finding:
    """An error of ours, where a failure reads a run in which the verifier itself failed."""
    ours = any(run.probe_failed and run.role in rule.needs for run in evidence.runs)
    if found.status != "fail" or not ours:
        return found
    what = "fsdp2 itself failed in a run that this rule needs: see `verifier`"
    return Finding(rule.name, "error", what)


def same_end_after_resume(rule: Rule, evidence: Evidence, found: Finding) -> Finding:
    """A pass, where a resume ends with the weights of the uninterrupted run, bit by bit."""
    if found.status != "fail" or not rule.about_the_resume:
        return found
    steps = comes_to_the_same_end(evidence)
    if not steps:
        return found
    same = (
        f"{steps} steps after the resume the script ends with the weights of the uninterrupted"
        " run, bit by bit"
    )
    # Equal weights prove nothing of a best value or an average, which never reach them.
    if rule.policy(BesideTheWeights):
        return rule.unknown(f"its state could not be aligned: {same}")
    return rule.passed(same)


def only_slow(rule: Rule, evidence: Evidence, found: Finding) -> Finding:
    """Inconclusive, where a run of a rule that compares or waits was still computing at its time
    limit.
    """
    compares = rule.family == "hang" or not rule.names_a_cause
    run = next((run for run in evidence.runs if run.slow and run.role in rule.needs), None)
    if found.status != "fail" or not compares or run is None:
        return found
    doing = computing(run) or "it was still making progress"
    what = (
        f"{doing} when the {run.timeout:.0f} s of the {run.role} run were over, after"
        f" {count(run.steps(), 'step')}"
    )
    return rule.unknown(f"{what}: pass a larger --timeout, a smaller model or fewer --steps")


def only_cut(rule: Rule, evidence: Evidence, found: Finding) -> Finding:
    """Inconclusive, where ranks may wait for one another only since the train run ends its script
    early: the script's own end does not show that they do.
    """
    train, survey = evidence.train, evidence.survey
    if found.status != "fail" or rule.family != "hang":
        return found
    if train is None or train.completed or survey is None or not survey.completed:
        return found
    stopped = any(end.how == "stopped" for end in train.all(End))
    # Ranks that make different numbers of steps wait for one another wherever the script ends.
    if not stopped or steps_differ(survey):
        return found
    what = "the train run ended its ranks at different places"
    return rule.unknown(f"the whole script comes to its end, and {what}")


def lacking_here(rule: Rule, evidence: Evidence, found: Finding) -> Finding:
    """Inconclusive, where a run of the rule stopped at what this machine does not have: FSDP2 for
    its CPU, a part of CUDA, a package.
    """
    if found.status != "fail":
        return found
    runs = [run for run in evidence.runs if run.role in rule.needs | rule.reads]
    cuda = [beyond_cuda_on_cpu] if evidence.cuda_on_cpu else []
    for lacks in (replicas_not_reduced, *cuda, not_installed):
        reason = next(filter(None, map(lacks, runs)), "")
        if reason:
            return rule.unknown(reason)
    return found


def listener_failed(rule: Rule, evidence: Evidence, found: Finding) -> Finding:
    """Inconclusive, where the probe did not see all that a rule of LISTENED reads."""
    if found.status not in ("pass", "not_applicable") or rule.family not in LISTENED:
        return found
    traces = evidence.train.traces if evidence.train is not None else ()
    record = next((r for trace in traces for r in trace.of(ProbeError)), None)
    if record is None:
        return found
    return rule.unknown(f"the probe failed ({record.symbol}: {record.text})")


def seen_in_the_sources(rule: Rule, evidence: Evidence, found: Finding) -> Finding:
    """A failure, where the static tier saw one and the runs decide nothing."""
    hits = evidence.hits.get(rule.name)
    if found.status not in ("inconclusive", "not_covered", "not_applicable") or not hits:
        return found
    return seen(rule, evidence, hits)


def at_the_cause(rule: Rule, evidence: Evidence, found: Finding) -> Finding:
    """At the line that the static tier knows, where the run knows only the sharding call."""
    hits, train, place = evidence.hits.get(rule.name), evidence.train, found.location
    if found.status != "fail" or not hits or train is None or place is None:
        return found
    calls = {(r.at_line.file, r.at_line.line) for r in train.places(Shard) if r.at_line}
    if (place.file, place.line) not in calls:
        return found
    return replace(found, location=hits[0].location)


QUESTIONS: tuple[Pass[Question], ...] = (
    Pass(
        caused_by_the_cpu,
        "what only gloo or the CPU does says nothing of a script for GPUs (zoo/written_for_gpus)",
        "first: no run, however long, would say more",
    ),
    Pass(
        too_short,
        "a run that stopped early shows neither the fault nor that there is none",
        "before every question that reads the train run, which may not be there",
    ),
    Pass(
        not_of_the_kind,
        "what a script does not have needs no run that shows it",
        "before `not_shown`: a script that saves nothing is not asked for a save",
    ),
    Pass(
        not_shown,
        "what the script has and no run reached is inconclusive, with the option that makes it",
        "before the rule judges: it may rely on there being something to judge",
    ),
    Pass(
        what_it_finds,
        "what the rule itself says of the evidence",
        "last: the questions before it say why not to ask it",
    ),
)
OF_ONE: tuple[Pass[OfOne], ...] = (
    Pass(
        ended_by_us,
        "a rank that the verifier ended is no failure of the script",
        "first: no later pass may make a pass or a doubt of what such a run shows",
    ),
    Pass(
        same_end_after_resume,
        "phases and turns are counted otherwise after a resume, and lose nothing (exam r4"
        " l_14_progressive_distill, r9 hb_12_mezo)",
        "before doubts about runs: bits that agree at the end are proof, not doubt",
    ),
    Pass(
        only_slow,
        "a large model on a CPU failed as if its ranks hung; a cause that was seen stays one",
        "first of the doubts: its advice, a larger --timeout, may resolve the others",
    ),
    Pass(
        only_cut,
        "the verifier ends the train run early, perhaps at different places of the ranks",
        "after `only_slow`: where both hold, a larger --timeout is the better advice",
    ),
    Pass(
        lacking_here,
        "a missing package, part of CUDA or HSDP of torch < 2.8 on a CPU is the machine's matter",
        "last of the doubts: it reads also the runs that the rule can do without",
    ),
    Pass(
        listener_failed,
        "an error in the probe's listener looks like nothing seen",
        "after `same_end_after_resume`, which may make a pass of a failure",
    ),
    Pass(
        seen_in_the_sources,
        "what the sources show counts where the runs find nothing out",
        "last: it replaces every way of being inconclusive or not applicable above",
    ),
    Pass(
        at_the_cause,
        "bf16-master-weights stood at `fully_shard`, and lint knew the line that makes the weights",
        "anywhere in this table: it changes only where a failure stands",
    ),
)
