"""Designs that a comparison has to know: what is no plain data parallelism, and saves in the middle
of a step.
"""

from dataclasses import replace

from ..evidence import SAVES, Evidence, saves_of
from ..trace import Run, Sketch, Trace, difference
from ..trace.events import Checkpoint, Micro, Step
from ..trace.sketches import add

PARTS_OR_COPIES = (
    "the script stopped, and no run of one process shows whether they are parts of one tensor"
)


def saved_in_a_step(evidence: Evidence) -> str:
    """Why the first step of a resumed run is only the rest of one: the save came after some of its
    backward passes. "" if it is not.
    """
    after = evidence.saved_after()
    early = begun_before_save(evidence.trained, after) if after is not None else None
    return (
        f"saved after {early[0]} of the {early[1]} backward passes of a step: see resume-is-exact"
        if early
        else ""
    )


def begun_before_save(train: Run, after: int) -> tuple[int, int] | None:
    """(the backward passes of a step that come before the last save after step `after`, all of the
    step), if there are any before.
    """
    saves = [r.seq for r in saves_of(train) if r.after_step == after]
    micros = train.consumed(after + 1)[0] if train.traces else []
    early = sum(micro.seq < saves[-1] for micro in micros) if saves else 0
    # A save in the middle of a step keeps its gradients (exam round 6 t_15): the first resumed step
    # is the rest of one (exam r6 t_15_token_budget).
    return (early, len(micros)) if 0 < early < len(micros) else None


def resumable(train: Run, after: int) -> Run:
    """The train run as a resume after step `after` continues it: without what the next step begins
    with before the save, and clears.

    A script that updates its weights itself may end its step with a backward, of a line search,
    whose gradients it takes away.
    """
    traces = []
    for trace in train.traces:
        saves = [
            r.seq
            for r in trace.of(Checkpoint)
            if r.after_step == after and r.op in (*SAVES, "write")
        ]
        # An own L-BFGS ends its step with a backward before the save, and takes its gradients away
        # (exam r10 kd_15_seismic_lbfgs_inversion).
        end = min(max(saves, default=0), trace.cleared(after + 1))
        kept = [
            r
            for r in trace.records
            if not (isinstance(r, Micro) and r.step == after + 1 and r.seq < end)
        ]
        traces.append(trace if len(kept) == len(trace.records) else Trace(trace.rank, tuple(kept)))
    same = all(a is b for a, b in zip(traces, train.traces, strict=True))
    return train if same else replace(train, traces=tuple(traces))


def divided_by_script(evidence: Evidence) -> set[str]:
    """The parameters of which the script itself gives each rank a part: they have another shape in
    one process.
    """
    return (
        cut_otherwise(evidence.trained, evidence.single) if evidence.single is not None else set()
    )


def parts_or_copies(evidence: Evidence) -> set[str]:
    """The parameters outside `fully_shard`, other on each rank from the beginning, of which no run
    of one process shows whether they are parts: the script stops on several ranks.
    """
    run = evidence.trained
    if evidence.single is not None or run.completed:
        return set()
    # Experts of a rank in scripts that gloo ended (papers round 1 moe_expert_dispatch, round 2
    # jet_energy_moe) are no missing reduction.
    return {n for n in replicas_that_differ(run) if not run.parameters[n][0].managed}


def replicas_that_differ(run: Run) -> list[str]:
    """Plain parameters of which two ranks hold other values at the first forward."""

    def differ(first: Sketch, *others: Sketch) -> bool:
        # Copies of one parameter have the same bits; 1e-9 of the norm only covers the sketch's own
        # sums.
        return any(difference(first, other) > 1e-9 * (1.0 + first[0] ** 0.5) for other in others)

    plain = {
        name: [e.sketch for e in entries if not e.sharded]
        for name, entries in run.parameters.items()
    }
    return [name for name, copies in plain.items() if copies and differ(*copies)]


def cut_otherwise(run: Run, other: Run) -> set[str]:
    """The parameters outside `fully_shard` that have another shape in a run on another number of
    ranks.
    """
    shapes = {name: entries[0].shape for name, entries in other.parameters.items()}
    return {
        n
        for n, e in run.parameters.items()
        # A table that the script cuts itself has another shape in one process (exam round 6 w_14):
        # no copy to compare (exam r6 w_14_rowparallel_table; round 12: tables that the script
        # cuts).
        if not e[0].managed and shapes.get(n, e[0].shape) != e[0].shape
    }


def parts_and_meets(run: Run) -> bool:
    """Whether copies of a sharded parameter part in training and are equal again later: the script
    averages them, as in local SGD.
    """
    for name, entries in run.parameters.items():
        if not entries[0].managed or len({entry.copy for entry in entries}) < 2:
            continue
        equal = []
        for step in range(1, run.steps() + 1):
            held: dict[int, Sketch] = {}
            for entry, record in zip(entries, run.at_step(Step, step), strict=False):
                if name in record.weights:
                    held[entry.copy] = add(held.get(entry.copy), record.weights[name])
            copies = list(held.values())
            equal.append(
                all(
                    # Averaged copies are equal bit by bit, but for the order in which their shards
                    # are summed here (exam r6 w_19_diloco).
                    difference(copies[0], o) <= 1e-9 * (1.0 + copies[0][0] ** 0.5)
                    for o in copies[1:]
                )
            )
        # Replicas that part and are equal again later are averaged every few steps (local SGD,
        # round 6 w_19): no missing reduction (exam r6 w_19_diloco).
        return False in equal and True in equal[equal.index(False) :]
    return False
