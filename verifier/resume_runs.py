"""The runs that bring a checkpoint back: on the same ranks, on other ranks, after a crash, with a damaged file."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .evidence import SAVES, Evidence
from .saves import all_saves, dcp_file, events, final_path, saves_of
from .target import Target
from .trace import Run

if TYPE_CHECKING:
    from .runner import Runner

SHARED = ("train", "resume", "continued", "reshard", "crash", "recovered", "damaged")
_GRACE = 3.0
_UNEVEN = 3


def open_saves(runner: Runner, train: Run) -> Run | None:
    """A process of its own opens whatever the train run has saved; None if that is nothing."""
    paths = sorted({final_path(train, save) for save in all_saves(train) if save.to})
    return runner.run("opened", 1, open=paths, argv=[], starting_point="") if paths else None


def resume_runs(target: Target, runner: Runner, evidence: Evidence, exact: bool, needs: Collection[str]) -> Evidence:
    """The resumed runs that are needed and possible; a missing one has its reason in `evidence.missing`."""
    after, missing = evidence.saved_after(shlex.join(target.resume_args)), evidence.missing
    wanted = {"resume", "reshard", "crash", "damaged"} & set(needs)
    if not target.resume_args or after is None:
        last = target.steps - 1
        reason = (
            "how this script resumes is not known: give --resume-args"
            if not target.resume_args
            else f"no save was seen before step {target.steps}: give --save-args that save after one of the steps 1 to {last}"
        )
        missing |= dict.fromkeys(("resume", "reshard", "crash", "damaged"), reason)
        return evidence
    if not wanted:
        return evidence
    if (last_save := _end_with_save(target, runner, evidence.train, after)) is not None:
        missing |= dict.fromkeys(("resume", "reshard", "crash", "damaged"), last_save)
        return evidence
    if reason := runner.keep_checkpoint():
        told = f"what the train run has left in the folder of {{checkpoint}} cannot be copied: {reason}"
        missing |= dict.fromkeys(("resume", "reshard", "crash", "damaged"), told)
        return evidence
    left = target.steps - after

    def resumed(role: str, world: int, exact: bool, extra: tuple[str, ...] = ()) -> Run:
        runner.restore_checkpoint()
        arguments = (*target.resume_args, *extra)
        return runner.run(role, world, arguments, steps=left, exact=exact, starting_point="")

    resume = resumed("resume", target.nproc, False)
    sizes = target.reshard_to if "reshard" in needs else ()
    if not sizes:
        missing["reshard"] = "no other world size was asked for: give --reshard-to"
    continued = resumed("continued", target.nproc, True) if exact and sizes else evidence.train
    reshards = [resumed("reshard", world, exact, target.reshard_args) for world in sizes]
    if sizes and not target.sizes_chosen and _divides_by_three(evidence.train, target):
        uneven = resumed("reshard", _UNEVEN, exact, target.reshard_args)
        reshards += [uneven] if uneven.completed else []
    evidence = replace(evidence, resume=resume, continued=continued, reshards=tuple(reshards))
    if not resume.completed:
        missing |= dict.fromkeys(("crash", "damaged"), "the script does not resume even from a whole checkpoint")
        return evidence
    return replace(
        evidence,
        crashes=_crash_runs(target, runner, evidence) if "crash" in needs else (),
        damaged=_damage_runs(target, runner, evidence) if "damaged" in needs else (),
    )


def _end_with_save(target: Target, runner: Runner, train: Run | None, after: int) -> str | None:
    """Make the save after step `after` the last one in the folder; why that cannot be, if it cannot.

    A script that saves after the last compared step too would resume from there, where there is nothing to compare with.
    """
    saves = [r for r in train.places("checkpoint") if r["op"] in SAVES] if train is not None else []
    sharded = [r["after_step"] for r in saves if r["op"] != "torch.save"]
    if train is None or max(sharded or [r["after_step"] for r in saves]) < train.steps():
        return None
    if (reason := _elsewhere(runner, train)) is not None:
        return f"it saves after step {train.steps()} too, and {reason}"
    runner.empty_checkpoint()
    again = runner.run("train", target.nproc, target.save_args, steps=after, starting_point="")
    mine, theirs = again.at_step("step", after), train.at_step("step", after)
    if not mine or any(a["weights"] != b["weights"] for a, b in zip(mine, theirs, strict=True)):
        return f"it saves after step {train.steps()} too, and does not repeat itself: save less often"
    return None


def _divides_by_three(train: Run | None, target: Target) -> bool:
    """Whether this script keeps its global batch on three ranks, as far as can be told from what it did."""
    if train is None or target.nproc == _UNEVEN or _UNEVEN in target.reshard_to:
        return False
    if any(len(e[0]["mesh"]) > 1 for e in train.parameters.values()):
        return False
    batch, micros = train.global_batch(1).total(), train.micros(1)
    largest = max((len(m["rows"]) for rank in micros for m in rank), default=0)
    several = any(len(rank) > 1 for rank in micros)
    return batch > 0 and batch % (_UNEVEN * largest if several else _UNEVEN) == 0


@dataclass(frozen=True)
class Moment:
    """Where a rank is killed: in its `call`-th save. `steps`: what the run needs to come there."""

    rank: int
    call: int
    moment: str
    steps: int

    @property
    def note(self) -> str:
        """In words."""
        where = {
            "before-data": "before it wrote its data file",
            "before-metadata": "when all data was written, before .metadata",
            "half-file": "when half of the file was written",
        }
        return f"rank {self.rank} killed in its save number {self.call}, {where[self.moment]}"


def moments(train: Run, thorough: bool) -> list[Moment]:
    """Where to kill, the strongest first: in the second save, where there is a complete one and perhaps one to overwrite."""
    steps = events(train)
    if not steps:
        return []
    first = steps[0]
    second = steps[1] if len(steps) > 1 else 2 * first
    found = []
    for rank, moment in ((train.world_size - 1, "before-data"), (0, "before-metadata")):
        own = [save for save in saves_of(train.traces[rank]) if save.after == first]
        sharded = [n for n, save in enumerate(own) if save.op != "torch.save" and not save.alone]
        if sharded:
            found += [Moment(rank, len(own) + sharded[-1] + 1, moment, second + 1)] if second > first else []
            found += [Moment(rank, sharded[-1] + 1, moment, first + 1)]
    if not found:
        for trace in reversed(train.traces):
            own = [save for save in saves_of(trace) if save.after == first]
            if own:
                found += [Moment(trace.rank, 2 * len(own), "half-file", second + 1)] if second > first else []
                found += [Moment(trace.rank, len(own), "half-file", first + 1)]
                break
    found.sort(key=lambda moment: moment.call, reverse=True)
    return found if thorough else [m for m in found if m.rank == found[0].rank]


def _crash_runs(target: Target, runner: Runner, evidence: Evidence) -> tuple[tuple[Run, Run], ...]:
    train = evidence.train
    assert train is not None
    if (reason := _elsewhere(runner, train)) is not None:
        evidence.missing["crash"] = reason
        return ()
    done: list[tuple[Run, Run]] = []
    for moment in moments(train, target.thorough):
        runner.empty_checkpoint()
        crash = {"rank": moment.rank, "call": moment.call, "moment": moment.moment}
        options = {"watch_saves": True, "starting_point": "", "grace": min(_GRACE, target.timeout), "crash": crash}
        run = runner.run("crash", target.nproc, target.save_args, steps=moment.steps, **options)
        if all(trace.first("killed") is None for trace in run.traces):
            continue  # this run makes no such save
        recovered = runner.run("recovered", target.nproc, target.resume_args, steps=1, starting_point="")
        done.append((replace(run, note=moment.note), replace(recovered, note=moment.note)))
        if not target.thorough:
            break
    if not done:
        evidence.missing["crash"] = (
            "no save of this script could be interrupted (it writes through neither DCP nor torch.save)"
        )
    return tuple(done)


def _damage_runs(target: Target, runner: Runner, evidence: Evidence) -> tuple[Run, ...]:
    train, after = evidence.train, evidence.saved_after()
    assert train is not None
    if (reason := _elsewhere(runner, train)) is not None:
        evidence.missing["damaged"] = reason
        return ()
    done = []
    for kind in ("truncated", "without .metadata") if target.thorough else ("truncated",):
        runner.restore_checkpoint()
        note = None
        for path in sorted({Path(final_path(train, save)) for save in all_saves(train) if save.after == after}):
            note = _truncate(path, kind) or note
        if note is not None:
            run = runner.run("damaged", target.nproc, target.resume_args, steps=1, starting_point="")
            done.append(replace(run, note=note))
    if not done:
        evidence.missing["damaged"] = "no file of the last save was found"
    return tuple(done)


def _truncate(path: Path, kind: str) -> str | None:
    """Cut the largest file of a checkpoint in half, or take its `.metadata` away; what was done."""
    if kind != "truncated":
        if not (path / ".metadata").is_file():
            return None
        (path / ".metadata").unlink()
        return f"{path.name} without its .metadata"
    file = dcp_file(path) if path.is_dir() else path
    if file is None or not file.is_file():
        return None
    os.truncate(file, file.stat().st_size // 2)
    return f"{file.relative_to(path.parent)} cut to half its length"


def _elsewhere(runner: Runner, train: Run) -> str | None:
    """Why its checkpoints cannot be damaged: they are not in the folder that is ours to empty."""
    ours = str(runner.checkpoint) + os.sep
    paths = [final_path(train, save) for save in all_saves(train) if save.to]
    outside = [p for p in paths if not (p + os.sep).startswith(ours)]
    return f"it saves to {outside[0]}, outside the folder of {{checkpoint}}" if outside else None
