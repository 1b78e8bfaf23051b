"""How far a script has to be run: from the survey run, which went as far as its time allowed."""

from itertools import pairwise

from ..evidence import (
    RESUMED_STEPS,
    Evidence,
    Sources,
    all_kinds_by,
    marked_from,
    saved_from,
    saves_of,
)
from ..tolerances import AFTER_A_BLOCK, FIRST_SAVE, LEAST, MOST, MOST_FAST, QUICK_SECONDS
from ..trace import Run, Trace
from ..trace.events import Micro, Model, Reached, Shard
from .reached import Seen, first_times


def steps_to_compare(survey: Run, sources: Sources, resumes: bool) -> int:
    """At least LEAST steps, past each first time within MOST steps (of a branch or a loop in the
    training loop, of another number of backwards or of trainable parameters in a step), and
    RESUMED_STEPS after the first save that has seen them all.
    """
    made, changes, most = steps_of(survey), _changes(survey), _most(survey)
    firsts = [
        step
        for _, block, step in first_times(Seen.by(survey), sources)
        if step is not None and step <= most and not block.returns
    ]
    wanted = [LEAST, *(step + AFTER_A_BLOCK for step in firsts), *(step + 1 for step in changes)]
    if resumes:
        late = max([0, *(step + 1 for step in firsts), *(step for step in changes if step <= most)])
        saves = (all_kinds_by(survey, most), saved_from(survey, late, most))
        first = saved_from(
            survey, 0, FIRST_SAVE
        )  # without a save nothing of a resume can be judged
        # A save in the background can be resumed from only after the file that marks it as complete
        # (round 10-11: a save in the background and the file that marks it complete).
        first = max(first, marked_from(survey, first, FIRST_SAVE))
        most = max(most, first + RESUMED_STEPS)
        wanted += [step + RESUMED_STEPS for step in (*saves, first)]
    return max(
        LEAST,
        min(max(step for step in wanted if step <= most + RESUMED_STEPS), most, made or LEAST),
    )


def _most(survey: Run) -> int:
    """How many steps may be compared, by the time that those of the survey run took: as many as
    take QUICK_SECONDS seconds.
    """
    seen = (
        [event for event in survey.traces[0].of(Reached) if event.steps and not event.ended]
        if survey.traces
        else []
    )
    made = seen[-1].steps - seen[0].steps if seen else 0
    each = (seen[-1].at - seen[0].at) / made if made > 0 else QUICK_SECONDS
    return min(MOST_FAST, max(MOST, int(QUICK_SECONDS / max(each, 1e-6))))


def steps_of(survey: Run) -> int:
    """The optimizer steps that every rank of the survey run has made."""
    return min((_last(trace) for trace in survey.traces), default=0)


def steps_differ(survey: Run) -> bool:
    """Whether the ranks of the survey run made different numbers of optimizer steps: some skip what
    others make.
    """
    # Ranks that made different numbers of steps skip what others make: then the cut of the train
    # run excuses no hang.
    return len({_last(trace) for trace in survey.traces}) > 1


def _last(trace: Trace) -> int:
    """The steps of one rank, from the last first step on."""
    events = trace.of(Reached)
    # Each first step begins a training; only the last one is that of the model that is judged.
    begins = [number for number, event in enumerate(events) if event.stack]
    return max((event.steps for event in events[begins[-1] :]), default=0) if begins else 0


def trains_before_sharding(survey: Run) -> bool:
    """Whether the script makes optimizer steps before its first `fully_shard`, and some after it;
    or trains another model in between.
    """
    reached = survey.all(Reached)
    begins = [event.sharded for event in reached if event.stack]
    # A base model that rank 0 trains apart, before (round 1) or after the sharding (round 7 fa_02),
    # is another training.
    return (False in begins and True in begins) or any(
        event.ended and event.apart for event in reached
    )


def prepares_before_sharding(train: Run) -> bool:
    """Whether models are called, and not trained, before the first `fully_shard`: an initialisation
    by the data does that.
    """
    if not train.traces or (shard := train.traces[0].first(Shard)) is None:
        return False
    trace = train.traces[0]
    called, trained = trace.first(Model), trace.first(Micro)
    # An initialisation by the data calls the model before it is sharded: runs start after it (exam
    # r6 t_07_flow_actnorm, u_04_flow_init twins).
    return called is not None and trained is not None and called.seq < shard.seq < trained.seq


def steps_without_backward(evidence: Evidence) -> int:
    """The steps of a training without backward, of which the survey run shows only whether it came
    to its end.
    """
    return MOST_FAST if evidence.survey is not None and evidence.survey.completed else MOST


def own_steps(train: Run) -> str:
    """Where a step ends in a script that updates its weights itself, as a request says it
    (probe/events/manual_optimizer_steps.py).

    "forwards" if a sharded model was called and the run came to its end without a backward or a
    step; "backwards" if most updates are followed by a backward on the very samples of the one
    before, not beyond a save, and others follow; "" if each is a step.
    """
    if not train.steps():
        parts = [entries[0] for entries in train.parameters.values()]
        trains = any(part.sharded for part in parts) and not train.all(Micro)
        # Sharded weights, no backward and no step: zeroth order or evolution; its steps end where
        # other samples come (zeroth order and evolution: exam r2 f_11_mezo to r8 gd_11).
        return "forwards" if train.completed and trains else ""
    if any(record.cls for record in train.traces[0].steps):
        return ""
    micros, saves = train.traces[0].of(Micro), [record.seq for record in saves_of(train)]
    pairs = [
        (a, b, bool(a.rows) and a.rows == b.rows) for a, b in pairwise(micros) if a.step != b.step
    ]
    if any(same and a.seq < save < b.seq for a, b, same in pairs for save in saves):
        # A save between two backwards on the same samples: each was a step, as with full-batch
        # training (scripts without an optimizer that train on one batch (zoo/own_update)).
        return ""  # several steps are made on the same samples
    # Most updates are followed by a backward on the same samples: they are tried, as in
    # zoo/conjugate_gradients or a line search (zoo/conjugate_gradients; exam r2 f_16_line_search
    # (inconclusive at first sight)).
    tries = 2 * sum(same for _, _, same in pairs) > len(pairs)
    return "backwards" if tries and any(micro.rows != micros[0].rows for micro in micros) else ""


def _changes(survey: Run) -> list[int]:
    """The steps that have another number of backwards, or of trainable parameters, than the step
    before.
    """
    if not survey.traces:
        return []
    counts = [
        # Another number of trainable parameters begins a phase, which must be compared (exam round
        # 5, missed: blocks that are unfrozen, a freeze that a resume does not lift).
        (r.steps, (r.backwards, r.trainable))
        for r in survey.traces[0].of(Reached)
        if r.steps and not r.ended
    ]
    return [step for (_, before), (step, now) in pairwise(counts) if before != now]
