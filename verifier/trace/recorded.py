"""What the ranks of one launch recorded, and how they ended."""

import math
import os
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..errors import PROBE_FAILED
from ..tolerances import STILL
from . import events
from .events import Step
from .rank import E, Ended, S, Trace


@dataclass(frozen=True)
class Recorded:
    """One launch: its records, rank by rank, and how it ended. A simulate run has rank 0 alone.

    `role`: a name of the table of roles (roles.py).
    """

    role: str
    world_size: int
    traces: tuple[Trace, ...]
    ended: tuple[Ended, ...] = ()
    timed_out: bool = False
    seconds: float = 0.0
    stacks: dict[int, str] = field(default_factory=dict)
    stderr: dict[int, str] = field(default_factory=dict)
    # by rank, in order
    progress: dict[int, list[events.ProgressEvent]] = field(default_factory=dict)
    command: str = ""
    # what in the verifier's own files the probe has not written: then no record is used
    foreign: str = ""
    note: str = ""  # what the verifier changed in it, or in the checkpoint that it loads
    timeout: float = 0.0  # in seconds
    # for how many seconds no rank had recorded anything when the time was over
    quiet: float = math.inf
    busy: tuple[int, ...] = ()  # the ranks that computed then, and did not wait for another one
    # of a run with a rank killed in a save: what lies in the folder of `{checkpoint}`
    left: tuple[str, ...] = ()
    stdout: dict[int, str] = field(default_factory=dict)
    # by rank: the last collectives that the script called, in order
    calls: dict[int, list[events.CollectiveCall]] = field(default_factory=dict)

    @property
    def completed(self) -> bool:
        """Whether every rank reached the end of the script, or the last requested step, without an
        error.
        """
        ends = [(t.end.how, t.end.code) if t.end is not None else None for t in self.traces]
        return (
            bool(ends)
            and not self.timed_out
            and {*ends} <= {("stopped", 0), ("return", 0), ("sys.exit", 0)}
        )

    @property
    def slow(self) -> bool:
        """Whether it was still making progress, or computing, when its time was over."""
        return self.timed_out and (bool(self.busy) or self.going_on)

    @property
    def going_on(self) -> bool:
        """Whether ranks had recorded something shortly before its time was over."""
        return self.timed_out and self.quiet < STILL * self.timeout

    @property
    def probe_failed(self) -> str:
        """The error of the verifier itself that ended a rank, so that the run cannot be judged; ""
        if there was none.
        """
        for item in self.ended:
            trace = next((t for t in self.traces if t.rank == item.rank), None)
            if item.code == PROBE_FAILED and (trace is None or trace.end is None):
                record = trace.first(events.ProbeError) if trace is not None else None
                last = self.stderr.get(item.rank, "").strip().rpartition("\n")[2]
                return f"rank {item.rank}: {_probe_error(record) if record else last}"
        return ""

    @property
    def probe_errors(self) -> list[str]:
        """The errors of the verifier itself in this run, each once."""
        found = [self.probe_failed] if self.probe_failed else []
        found += [
            f"rank {t.rank}: {_probe_error(record)}"
            for t in self.traces
            for record in t.of(events.ProbeError)
        ]
        return list({text.partition(": ")[2]: text for text in reversed(found)}.values())[::-1]

    @cached_property
    def parameters(self) -> dict[str, list[events.Parameter]]:
        """{parameter name: its record on each rank} at the first forward; its replicas are numbered
        from 0.
        """
        found: dict[str, list[tuple[int, events.Parameter]]] = {}
        for trace in self.traces:
            for model in _latest_models(trace):
                for entry in model.parameters:
                    found.setdefault(entry.name, []).append((trace.rank, entry))
        numbered: dict[str, list[events.Parameter]] = {}
        for name, entries in found.items():
            copies = sorted({entry.copy for _, entry in entries})
            numbered[name] = [
                replace(e, rank=rank, copy=copies.index(e.copy)) for rank, e in entries
            ]
        return numbered

    @cached_property
    def models(self) -> list[events.Model]:
        """The model records of rank 0 (of the first rank that has any)."""
        return next((m for t in self.traces if (m := _latest_models(t))), [])

    def steps(self) -> int:
        """Optimizer steps that every rank has made (of its first optimizer)."""
        return min((len(t.stepped) for t in self.traces), default=0)

    def at_step(self, kind: type[S], step: int) -> list[S]:
        """For each rank its record of `kind` (Step or Stepped) at a step; empty unless all have
        it.
        """
        per_rank = [t.steps if kind is Step else t.stepped for t in self.traces]
        found = [
            next((r for r in records if isinstance(r, kind) and r.step == step), None)
            for records in per_rank
        ]
        there = [record for record in found if record is not None]
        return there if len(there) == len(found) else []

    def micros(self, step: int) -> list[list[events.Micro]]:
        """For each rank the micro-batches of a step."""
        return [[r for r in t.of(events.Micro) if r.step == step] for t in self.traces]

    def consumed(self, step: int) -> list[list[events.Micro]]:
        """For each rank the micro-batches of a step whose gradients were not cleared before it (as
        those of SAM's first pass are).
        """
        found = []
        for trace, micros in zip(self.traces, self.micros(step), strict=True):
            found.append([micro for micro in micros if micro.seq > trace.cleared(step)])
        return found

    def copy(self, name: str, rank: int) -> int:
        """Which replica of a parameter a rank holds a part of."""
        return next(
            (entry.copy for entry in self.parameters.get(name, []) if entry.rank == rank), rank
        )

    def path_at_end(self, path: str, at: float) -> str:
        """The path at the end of the run of what was written to `path` at a time, after the renames
        by any rank.
        """
        for record in sorted(
            (r for trace in self.traces for r in trace.of(events.Renamed)), key=lambda r: r.at
        ):
            if record.at >= at and (path == record.old or path.startswith(record.old + os.sep)):
                path = record.new + path[len(record.old) :]
        return path

    def places(self, kind: type[E]) -> list[E]:
        """The records of a kind on rank 0."""
        return self.traces[0].of(kind) if self.traces else []

    def all(self, kind: type[E]) -> list[E]:
        """The records of a kind on all ranks, rank by rank."""
        return [record for trace in self.traces for record in trace.of(kind)]

    def line_of(
        self, kind: type[events.Located], last: bool = False, **match: object
    ) -> events.Place | None:
        """The user's line of the first (or last) event of a kind on rank 0, e.g.
        `line_of(Shard)`.
        """
        same = (
            r
            for r in self.places(kind)
            if all(getattr(r, name) == value for name, value in match.items())
        )
        found = [r.at_line for r in same if r.at_line is not None]
        return (found[-1] if last else found[0]) if found else None

    def scaled_line(self) -> events.Place | None:
        """The user's line that first changes gradients after the backward of the first step,
        besides a clip.
        """
        clips = {record.at_line for record in self.places(events.Clips)}
        changed = (record.at_line for record in self.places(events.ChangedGradients))
        return next((place for place in changed if place not in clips), None)

    def data_line(self) -> events.Place | None:
        """The user's line that built the loader of the first training batch; without a loader the
        one that bound this batch.
        """
        first, fed = (
            next(iter(self.places(events.Micro)), None),
            self.line_of(events.Fed, last=True),
        )
        started = [
            r for r in self.places(events.LoaderStarted) if first is not None and r.at <= first.at
        ]
        same = [
            r for r in started if r.at_line == fed
        ]  # not one of an evaluation before the training
        built = next((r.made or r.at_line for r in reversed(same or started)), None)
        return built or fed or self.line_of(events.Micro)


def _latest_models(trace: Trace) -> list[events.Model]:
    """One record for each root name; a root that contains an earlier one replaces it."""
    # A model that grows is recorded again: the last record has all its parameters (exam r4
    # l_15_growing_ae: parameters that are added while training runs).
    return list({r.root: r for r in trace.of(events.Model)}.values())


def _probe_error(record: events.ProbeError) -> str:
    return f"{record.symbol}: {record.text}{f' in {record.where}' if record.where else ''}"


def unused(schedule: events.Scheduled) -> bool:
    """Whether a schedule moves what no step uses.

    Two optimizers that take turns with the same parameters leave a gap once in a while: only one
    that is longer, by more than a step, than all before it is an end. A script that copies the rate
    of the schedule into another optimizer, or has another schedule for that, moves its rates.
    """
    return schedule.idle > schedule.before + 1 and schedule.moved and not schedule.others_moved
