"""A run and its traces, and what of several ranks and records is put together."""

import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from ..errors import PROBE_FAILED
from .events import Divide, End, Event, Micro, Model, Parameter, ProbeError, ProgressEvent, Renamed, Step, Stepped, Wrap
from .sketches import Sketch, add, of_number

E = TypeVar("E", bound=Event)
S = TypeVar("S", Step, Stepped)


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
        """The records of its steps, each with what other optimizers found when they stepped beside it."""
        return [_beside(record, others) for record, others in self._with_others(Step)]

    @cached_property
    def stepped(self) -> list[Stepped]:
        """The records of what its steps changed, each with what the other optimizers changed of their own parameters."""
        held = {r.optimizer: r.held for r in self.of(Step)}
        return [_changed_beside(record, others, held) for record, others in self._with_others(Stepped)]

    def _with_others(self, kind: type[S]) -> list[tuple[S, list[S]]]:
        """(record of the first optimizer, those of the others between it and the next one) of a kind.

        The first optimizer is the one that steps first, so another's step of the same iteration comes after it.
        """
        records = self.of(kind)
        main: list[S] = [r for r in records if r.optimizer == self.first_optimizer]
        marks = [*(float(r.seq) for r in main[1:]), math.inf]
        return [
            (record, [r for r in records if r is not record and record.seq < r.seq < end])
            for record, end in zip(main, marks, strict=False)
        ]

    @property
    def end(self) -> End | None:
        """How the script ended on this rank, if it could still say so."""
        return self.first(End)


def _beside(record: Step, others: list[Step]) -> Step:
    """A step's record with the state of the optimizers that step beside it, and the gradients that they find of their own."""
    first: dict[int, Step] = {}
    for other in others:
        first.setdefault(other.optimizer, other)
    for other in first.values():
        own = {name: value for name, value in other.grads_at_step.items() if name in other.held}
        record = replace(
            record,
            held=[*record.held, *(name for name in other.held if name not in record.held)],
            strangers=[*record.strangers, *(shape for shape in other.strangers if shape not in record.strangers)],
            lr=[*record.lr, *other.lr],
            state={**other.state, **record.state},
            grads_at_step={**record.grads_at_step, **own},
        )
    return record


def _changed_beside(record: Stepped, others: list[Stepped], held: dict[int, list[str]]) -> Stepped:
    """The record of a step's changes, with what the optimizers beside it changed of their own parameters."""
    weights, moved = dict(record.weights), dict(record.moved)
    for other in others:
        names = held.get(other.optimizer, ())
        weights |= {name: other.weights[name] for name in names if name in other.weights}
        moved |= {name: other.moved[name] for name in names if name in other.moved}
    return replace(record, weights=weights, moved=moved)


@dataclass(frozen=True)
class Ended:
    """The exit of one rank's process: `code` as in subprocess (negative: signal); `killed`: by the launcher."""

    rank: int
    code: int
    killed: bool
    at: float = math.inf  # on the clock of the records


@dataclass(frozen=True)
class Run:
    """One launch. A simulate run has rank 0 alone.

    `role`: train, provoked, repeat, full_precision, undropped, rounded_weights, reference, perturbed, single, original, resume,
    resume_full_precision, reshard, inspect, crash, recovered, damaged, simulate.
    """

    role: str
    world_size: int
    traces: tuple[Trace, ...]
    ended: tuple[Ended, ...] = ()
    timed_out: bool = False
    seconds: float = 0.0
    stacks: dict[int, str] = field(default_factory=dict)
    stderr: dict[int, str] = field(default_factory=dict)
    progress: dict[int, list[ProgressEvent]] = field(default_factory=dict)  # by rank, in order
    command: str = ""
    foreign: str = ""  # what stands in the verifier's own files and is not of the probe: then no record is believed
    note: str = ""  # what was done to it, or to the checkpoint that it finds
    timeout: float = 0.0  # seconds that it had

    @property
    def completed(self) -> bool:
        """Whether every rank came to the end that the verifier or the script had set, without an error."""
        good = all(t.end is not None and _clean(t.end) for t in self.traces)
        return bool(self.traces) and good and not self.timed_out

    @property
    def probe_failed(self) -> str:
        """Why a rank was ended by an error of the verifier itself, so that the run says nothing of the script; "" if none was."""
        for item in self.ended:
            trace = next((t for t in self.traces if t.rank == item.rank), None)
            if item.code == PROBE_FAILED and (trace is None or trace.end is None):
                record = trace.first(ProbeError) if trace is not None else None
                last = self.stderr.get(item.rank, "").strip().rpartition("\n")[2]
                return f"rank {item.rank}: {_probe_error(record) if record else last}"
        return ""

    @property
    def probe_errors(self) -> list[str]:
        """The errors of the verifier itself in this run, each once."""
        found = [f"rank {t.rank}: {_probe_error(record)}" for t in self.traces for record in t.of(ProbeError)]
        if self.probe_failed:
            found.insert(0, self.probe_failed)
        return list({text.partition(": ")[2]: text for text in reversed(found)}.values())[::-1]

    @cached_property
    def parameters(self) -> dict[str, list[Parameter]]:
        """{parameter name: its record on each rank} at the first forward; its replicas are numbered from 0."""
        found: dict[str, list[tuple[int, Parameter]]] = {}
        for trace in self.traces:
            for model in _latest_models(trace):
                for entry in model.parameters:
                    found.setdefault(entry.name, []).append((trace.rank, entry))
        copies = {name: sorted({entry.copy for _, entry in entries}) for name, entries in found.items()}
        return {
            name: [replace(e, rank=rank, copy=copies[name].index(e.copy)) for rank, e in entries]
            for name, entries in found.items()
        }

    @cached_property
    def data_ranks(self) -> list[int]:
        """The ranks that differ in their samples: those of rank 0's mesh in `fully_shard`, all if none was given.

        Ranks outside of it (tensor parallelism) work on the samples of one of these.
        """
        meshes = [wrap.mesh for wrap in self.places(Wrap) if wrap.mesh is not None]
        return sorted(max((mesh.ranks for mesh in meshes), key=len, default=range(self.world_size)))

    @cached_property
    def models(self) -> list[Model]:
        """The model records of rank 0 (of the first rank that has any)."""
        return next((m for t in self.traces if (m := _latest_models(t))), [])

    def steps(self) -> int:
        """Optimizer steps that every rank has made (of its first optimizer)."""
        return min((len(t.stepped) for t in self.traces), default=0)

    def at_step(self, kind: type[S], step: int) -> list[S]:
        """For each rank its record of `kind` (Step or Stepped) at a step; empty unless all have it."""
        per_rank = [t.steps if kind is Step else t.stepped for t in self.traces]
        found = [next((r for r in records if isinstance(r, kind) and r.step == step), None) for records in per_rank]
        there = [record for record in found if record is not None]
        return there if len(there) == len(found) else []

    def micros(self, step: int) -> list[list[Micro]]:
        """For each rank the micro-batches of a step."""
        return [[r for r in t.of(Micro) if r.step == step] for t in self.traces]

    def objective(self, step: int) -> float | None:
        """The loss whose gradient the step used: the sum over micro-batches and ranks, by what FSDP divides gradients by."""
        micros = self.micros(step)
        per_rank = [[m.loss for m in micros[rank]] for rank in self.data_ranks if rank < len(micros)]
        known = [[loss for loss in losses if loss is not None] for losses in per_rank]
        if not known or any(not losses for losses in known) or known != per_rank:
            return None
        return sum(math.fsum(losses) for losses in known) / self.divisor

    @cached_property
    def loss_scale(self) -> float:
        """What the losses of this run can resolve: the largest of them or of their terms, or of the changes that a step makes.

        A loss whose terms cancel is zero but for rounding; the change that its gradient and the step promise is not.
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
        """The largest norm of the whole gradient after backward ("grads") and where the optimizer finds it ("grads_at_step")."""
        steps = range(1, self.steps() + 1)
        norms = {field: [self.grad_norm(step, field) or 0.0 for step in steps] for field in ("grads", "grads_at_step")}
        return {field: max((n for n in found if math.isfinite(n)), default=0.0) for field, found in norms.items()}

    @property
    def divisor(self) -> float:
        """What the sum of gradients over ranks is divided by: the number of data ranks, or a factor that the script has set."""
        factors = [r.factor for r in self.places(Divide)]
        return factors[-1] if factors else float(len(self.data_ranks))

    @property
    def losses(self) -> list[float | None]:
        """`objective` of every step."""
        return [self.objective(step) for step in range(1, self.steps() + 1)]

    def whole(self, kind: type[S], field: str, step: int) -> dict[str, Sketch | None]:
        """{parameter: sketch of the whole tensor} from the shards of the ranks that hold its first replica."""
        records = self.at_step(kind, step)
        out: dict[str, Sketch | None] = {}
        for record, trace in zip(records, self.traces, strict=False):
            for name, value in getattr(record, field).items():
                if self.copy(name, trace.rank) != 0:
                    continue
                if value is None or (name in out and out[name] is None):
                    out[name] = None
                else:
                    out[name] = add(out.get(name), value)
        return out

    def whole_state(self, field: str, step: int) -> dict[str, Sketch]:
        """`whole` of "weights", or of every tensor of the optimizer's "state" as `parameter.key`, before a step."""
        if field == "weights":
            return {name: value for name, value in self.whole(Step, "weights", step).items() if value is not None}
        out: dict[str, Sketch] = {}
        for record, trace in zip(self.at_step(Step, step), self.traces, strict=False):
            for name, state in record.state.items():
                for key, value in state.items():
                    if self.copy(name, trace.rank) != 0:
                        continue
                    if isinstance(value, list):
                        out[f"{name}.{key}"] = add(out.get(f"{name}.{key}"), value)
                    else:
                        out[f"{name}.{key}"] = of_number(value)
        return out

    def copy(self, name: str, rank: int) -> int:
        """Which replica of a parameter a rank holds a part of."""
        entry = next((e for e in self.parameters.get(name, []) if e.rank == rank), None)
        return entry.copy if entry else rank

    def grad_norm(self, step: int, field: str = "grads") -> float | None:
        """Norm of the whole gradient after the last backward of a step (before any clipping)."""
        parts = [g[0] for g in self.whole(Step, field, step).values() if g is not None]
        return math.sqrt(math.fsum(parts)) if parts else None

    @property
    def grad_norms(self) -> list[float | None]:
        """`grad_norm` of every step."""
        return [self.grad_norm(step) for step in range(1, self.steps() + 1)]

    def along(self, step: int) -> float:
        """The change of the loss that the weight changes of a step promise, to first order."""
        pairs = zip(self.traces, self.at_step(Stepped, step), strict=False)
        return math.fsum(m[1] for t, r in pairs for name, m in r.moved.items() if self.copy(name, t.rank) == 0)

    def downhill(self) -> bool:
        """Whether the weight changes of all steps together point against the gradients, as those of a run that learns."""
        return math.fsum(self.along(step) for step in range(1, self.steps() + 1)) < 0.0

    def rows(self, step: int) -> list[Counter[int]]:
        """For each rank the hashes of the samples that its models saw in a step."""
        return [Counter(row for micro in micros for row in micro.rows) for micros in self.micros(step)]

    def global_batch(self, step: int) -> Counter[int]:
        """The hashes of all samples of a step."""
        rows = self.rows(step)
        return sum((rows[rank] for rank in self.data_ranks if rank < len(rows)), Counter())

    def path_at_end(self, path: str, at: float) -> str:
        """Where what was written to `path` at a time is at the end of the run, after the renames that any rank made."""
        for record in sorted((r for trace in self.traces for r in trace.of(Renamed)), key=lambda r: r.at):
            if record.at >= at and (path == record.old or path.startswith(record.old + os.sep)):
                path = record.new + path[len(record.old) :]
        return path

    def places(self, kind: type[E]) -> Iterator[E]:
        """Records of a kind on rank 0, the ones that name a line."""
        for trace in self.traces[:1]:
            yield from trace.of(kind)


def _latest_models(trace: Trace) -> list[Model]:
    """One record for each root name; a root that took in an earlier one has replaced it."""
    return list({r.root: r for r in trace.of(Model)}.values())


def _probe_error(record: ProbeError) -> str:
    return f"{record.symbol}: {record.text}{f' in {record.where}' if record.where else ''}"


def _clean(end: End) -> bool:
    """Whether the script came to its end, or to the one that the verifier had set."""
    return end.how in ("stopped", "return") or (end.how == "sys.exit" and end.code == 0)
