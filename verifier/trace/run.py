"""A run and its traces, and the quantities that combine several ranks and records."""

import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from ..errors import PROBE_FAILED
from . import events
from .beside import beside, changed_beside, others_go_on
from .events import Event, Step, Stepped
from .sketches import Sketch, add, of_number

E = TypeVar("E", bound=Event)
S = TypeVar("S", Step, Stepped)
CONTEXT = {
    "cp",
    "context",
    "context_parallel",
}  # names of a dim of a mesh over which sequences are split
CANCELS = 1e-5  # of the norm of the largest gradient: one that is smaller may be rounding alone
STILL = 0.1  # of its time limit: a run that recorded something in the last part of it was not stuck


@dataclass(frozen=True)
class Trace:
    """The events of one rank in one run, in order."""

    rank: int
    records: tuple[Event, ...]

    def of(self, kind: type[E]) -> list[E]:
        """The events of one kind."""
        return [r for r in self.records if isinstance(r, kind)]

    def first(self, kind: type[E]) -> E | None:
        """The first event of a kind, or None."""
        return next(iter(self.of(kind)), None)

    @cached_property
    def first_optimizer(self) -> int | None:
        """The number of the optimizer that steps first: its steps are the steps of the run."""
        return next((r.optimizer for r in self.of(Step)), None)

    @cached_property
    def steps(self) -> list[Step]:
        """The records of its steps, each merged with those of the other optimizers in the same
        step.
        """
        return [beside(record, others) for record, others in self._with_others(Step)]

    @cached_property
    def stepped(self) -> list[Stepped]:
        """The records of what its steps changed, each merged with what the other optimizers changed
        of their own parameters.
        """
        held = {r.optimizer: r.held for r in self.of(Step)}
        return [
            changed_beside(record, others, held) for record, others in self._with_others(Stepped)
        ]

    def _with_others(self, kind: type[S]) -> list[tuple[S, list[S]]]:
        """(record of the first optimizer, those of the others between it and its next one) of a
        kind.

        The first optimizer steps first, so another's step of the same iteration comes after it.
        """
        records = self.of(kind)
        main: list[S] = [r for r in records if r.optimizer == self.first_optimizer]
        marks = [*(float(r.seq) for r in main[1:]), math.inf]
        spans = list(zip(main, marks, strict=False))[: -1 if others_go_on(self.of(Step)) else None]
        return [
            (one, [r for r in records if r is not one and one.seq < r.seq < end])
            for one, end in spans
        ]

    def cleared(self, step: int) -> int:
        """The number of the last record by which gradients of a step were cleared before it; -1 if
        there is none.
        """
        edits = [
            r.seq
            for r in self.of(events.EditedGradients)
            if r.step == step and set(r.factors.values()) == {0.0}
        ]
        return max(
            [*edits, *(r.seq for r in self.of(events.Cleared) if r.step == step)], default=-1
        )

    @property
    def end(self) -> events.End | None:
        """How the script ended on this rank; None if the rank exited without recording it."""
        return self.first(events.End)


@dataclass(frozen=True)
class Ended:
    """The exit of one rank's process: `code` as in subprocess (negative: signal); `killed`: by the
    launcher.

    `lost`: the machine that stopped answering, and the rank with it.
    """

    rank: int
    code: int
    killed: bool
    at: float = math.inf  # on the clock of the records
    lost: str = ""


@dataclass(frozen=True)
class Run:
    """One launch. A simulate run has rank 0 alone.

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
    foreign: str = (
        ""  # what in the verifier's own files the probe has not written: then no record is used
    )
    note: str = ""  # what the verifier changed in it, or in the checkpoint that it loads
    timeout: float = 0.0  # in seconds
    # for how many seconds no rank had recorded anything when the time was over
    quiet: float = math.inf
    busy: tuple[int, ...] = ()  # the ranks that computed then, and did not wait for another one
    left: tuple[
        str, ...
    ] = ()  # of a run with a rank killed in a save: what lies in the folder of `{checkpoint}`

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
        """Whether it was still making progress when its time was over."""
        return self.timed_out and (bool(self.busy) or self.quiet < STILL * self.timeout)

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
    def data_ranks(self) -> list[int]:
        """The ranks with different samples: those of rank 0's mesh in `fully_shard`, all if none
        was given.

        Other ranks (tensor parallelism) get the samples of one of these. So do those of a
        context-parallel group, see `sequence_groups`.
        """
        meshes = [wrap.mesh for wrap in self.places(events.Wrap) if wrap.mesh is not None]
        return sorted(max((mesh.ranks for mesh in meshes), key=len, default=range(self.world_size)))

    @cached_property
    def context_groups(self) -> list[list[int]]:
        """The data ranks along the dim of a mesh that its name says splits sequences."""
        meshes = [
            r.mesh for r in self.places(events.NamedMesh) if not CONTEXT.isdisjoint(r.mesh.names)
        ]
        if not meshes:
            return []
        mesh = max(meshes, key=lambda mesh: len(mesh.ranks))
        dim = next(number for number, name in enumerate(mesh.names) if name in CONTEXT)
        stride, size = math.prod(mesh.shape[dim + 1 :]), mesh.shape[dim]
        firsts = [at for at in range(len(mesh.ranks)) if at // stride % size == 0]
        groups = [[mesh.ranks[at + stride * number] for number in range(size)] for at in firsts]
        return [group for group in groups if size > 1 and set(group) <= set(self.data_ranks)]

    @cached_property
    def sequence_groups(self) -> list[list[int]]:
        """The context-parallel groups whose ranks are given the same samples, of which each
        computes a part.
        """
        given = [[micro.rows for micro in micros] for micros in self.micros(1)]
        return [
            g
            for g in self.context_groups
            if max(g) < len(given) and all(given[r] == given[g[0]] for r in g)
        ]

    @cached_property
    def sample_ranks(self) -> list[int]:
        """The data ranks, of each group that shares its samples the first."""
        others = {rank for group in self.sequence_groups for rank in group[1:]}
        return [rank for rank in self.data_ranks if rank not in others]

    @cached_property
    def models(self) -> list[events.Model]:
        """The model records of rank 0 (of the first rank that has any)."""
        return next((m for t in self.traces if (m := _latest_models(t))), [])

    def steps(self) -> int:
        """Optimizer steps that every rank has made (of its first optimizer)."""
        return min((len(t.stepped) for t in self.traces), default=0)

    def until(self, step: int) -> "Run":
        """This run with what its ranks recorded up to the end of a step."""
        cut = []
        for trace in self.traces:
            last = next((r.seq for r in trace.stepped if r.step == step), 0)
            cut.append(
                Trace(
                    trace.rank,
                    tuple(r for r in trace.records if r.seq <= last or isinstance(r, events.End)),
                )
            )
        return replace(self, traces=tuple(cut))

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

    def objective(self, step: int) -> float | None:
        """The loss whose gradient the step used: the sum over micro-batches and ranks, by what FSDP
        divides gradients by.
        """
        micros = self.micros(step)
        per_rank = [
            [m.loss for m in micros[rank]] for rank in self.data_ranks if rank < len(micros)
        ]
        known = [[loss for loss in losses if loss is not None] for losses in per_rank]
        if not known or [] in known or known != per_rank:
            return None
        return sum(math.fsum(losses) for losses in known) / self.divisor

    @cached_property
    def loss_scale(self) -> float:
        """The scale of rounding in the losses: the largest loss, or sum of its terms, or
        first-order change by a step.

        A loss whose terms cancel is zero except for rounding; its first-order change is not.
        """
        sizes = [0.0]
        for step in range(1, self.steps() + 1):
            micros = self.micros(step)
            own = [m.loss for rank in self.data_ranks if rank < len(micros) for m in micros[rank]]
            sizes.append(math.fsum(abs(loss) for loss in own if loss is not None) / self.divisor)
            sizes.append(abs(self.along(step)))
        return max(size for size in sizes if math.isfinite(size))

    @cached_property
    def gradient_scale(self) -> dict[str, float]:
        """The largest norm of the whole gradient after backward ("grads") and at the optimizer step
        ("grads_at_step").
        """
        steps = range(1, self.steps() + 1)
        norms = {
            field: [self.grad_norm(step, field) or 0.0 for step in steps]
            for field in ("grads", "grads_at_step")
        }
        return {
            field: max((n for n in found if math.isfinite(n)), default=0.0)
            for field, found in norms.items()
        }

    @property
    def divisor(self) -> float:
        """The divisor of the sum of gradients over ranks: the number of data ranks, or a factor
        that the script has set.
        """
        factors = [r.factor for r in self.places(events.Divide)]
        return factors[-1] if factors else float(len(self.data_ranks))

    @property
    def losses(self) -> list[float | None]:
        """`objective` of every step."""
        return [self.objective(step) for step in range(1, self.steps() + 1)]

    def whole(self, kind: type[S], field: str, step: int) -> dict[str, Sketch | None]:
        """{parameter: sketch of the whole tensor} from the shards of the ranks that hold its first
        replica.
        """
        out: dict[str, Sketch | None] = {}
        for name, value in self._first_replica(kind, field, step):
            missing = value is None or (name in out and out[name] is None)
            out[name] = None if missing else add(out.get(name), value)
        return out

    def _first_replica(self, kind: type[S], field: str, step: int) -> Iterator[tuple[str, Any]]:
        """(parameter, value) of a field of every rank that holds a part of the parameter's first
        replica.
        """
        for record, trace in zip(self.at_step(kind, step), self.traces, strict=False):
            yield from (
                (k, v) for k, v in getattr(record, field).items() if self.copy(k, trace.rank) == 0
            )

    def whole_state(self, field: str, step: int) -> dict[str, Sketch]:
        """`whole` of "weights", or of every tensor of the optimizer's "state" as `parameter.key`,
        before a step.
        """
        if field == "weights":
            return {
                name: value
                for name, value in self.whole(Step, "weights", step).items()
                if value is not None
            }
        out: dict[str, Sketch] = {}
        for name, state in self._first_replica(Step, "state", step):
            for key, value in ((f"{name}.{key}", value) for key, value in state.items()):
                out[key] = add(out.get(key), value) if isinstance(value, list) else of_number(value)
        return out

    def copy(self, name: str, rank: int) -> int:
        """Which replica of a parameter a rank holds a part of."""
        return next(
            (entry.copy for entry in self.parameters.get(name, []) if entry.rank == rank), rank
        )

    def grad_norm(self, step: int, field: str = "grads") -> float | None:
        """Norm of the whole gradient after the last backward of a step (before any clipping)."""
        parts = [g[0] for g in self.whole(Step, field, step).values() if g is not None]
        return math.sqrt(math.fsum(parts)) if parts else None

    @cached_property
    def faint(self) -> dict[str, float]:
        """{parameter: its largest gradient, squared} where that is at most what rounding leaves of
        a sum that cancels.
        """
        largest: dict[str, float] = {}
        for step in range(1, self.steps() + 1):
            for name, g in self.whole(Step, "grads", step).items():
                largest[name] = max(largest.get(name, 0.0), g[0] if g is not None else 0.0)
        least = CANCELS**2 * max(largest.values(), default=0.0)
        return {name: value for name, value in largest.items() if value <= least}

    @property
    def grad_norms(self) -> list[float | None]:
        """`grad_norm` of every step."""
        return [self.grad_norm(step) for step in range(1, self.steps() + 1)]

    def along(self, step: int) -> float:
        """The first-order change of the loss by the weight changes of a step."""
        return math.fsum(moved[1] for _, moved in self._first_replica(Stepped, "moved", step))

    def reduces_loss(self) -> bool:
        """Whether the weight changes of all steps together reduce the loss to first order."""
        return math.fsum(self.along(step) for step in range(1, self.steps() + 1)) < 0.0

    def rows(self, step: int) -> list[Counter[int]]:
        """For each rank the hashes of the samples that its models saw in a step, without those of a
        loss of exactly zero (fillers).
        """
        all_micros = self.micros(step)
        counted = [[micro.loss != 0.0 for micro in micros] for micros in all_micros]
        for group in self.sequence_groups:  # a part of a sequence may have no target
            together = [
                any(parts) for parts in zip(*(counted[rank] for rank in group), strict=False)
            ]
            counted = [together if rank in group else own for rank, own in enumerate(counted)]
        pairs = zip(all_micros, counted, strict=True)
        used = [
            [micro for micro, own in zip(micros, flags, strict=False) if own] or micros
            for micros, flags in pairs
        ]
        return [Counter(row for micro in micros for row in micro.rows) for micros in used]

    def global_batch(self, step: int) -> Counter[int]:
        """The hashes of all samples of a step.

        What every rank is given counts once where their losses differ: a whole graph.
        """
        used = self._used(step)
        losses = {tuple(micro.loss for micro in micros) for micros in self.micros(step)}
        whole = len(losses) > 1 and all(one == used[0] for one in used)
        return used[0] if whole else sum(used, Counter())

    def same_batch(self, step: int, other: "Run") -> bool:
        """Whether two runs are given the same samples in a step: what every rank is given counts
        once, or each time.
        """
        once, each = (
            self.global_batch(step) == other.global_batch(step),
            sum(self._used(step), Counter()),
        )
        return once or each == sum(other._used(step), Counter())

    def _used(self, step: int) -> list[Counter[int]]:
        rows = self.rows(step)
        return [rows[rank] for rank in self.sample_ranks if rank < len(rows)]

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
    return list({r.root: r for r in trace.of(events.Model)}.values())


def _probe_error(record: events.ProbeError) -> str:
    return f"{record.symbol}: {record.text}{f' in {record.where}' if record.where else ''}"
