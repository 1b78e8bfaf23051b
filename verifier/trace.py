"""What a run left behind, as data: traces of its ranks, how each ended, and the numbers that rules compare."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from .seal import mark

Record = dict[str, Any]
Sketch = list[float]


@dataclass(frozen=True)
class Trace:
    """The records of one rank in one run, in order."""

    rank: int
    records: tuple[Record, ...]

    def of(self, kind: str) -> list[Record]:
        """The records of one kind."""
        return [r for r in self.records if r["kind"] == kind]

    def first(self, kind: str) -> Record | None:
        """The first record of a kind, or None."""
        return next((r for r in self.records if r["kind"] == kind), None)

    @cached_property
    def first_optimizer(self) -> int | None:
        """The number of the optimizer that steps first: its steps are the steps of the run."""
        return next((r["optimizer"] for r in self.of("step")), None)

    @cached_property
    def steps(self) -> list[Record]:
        """The records of its steps, each with what other optimizers found when they stepped beside it."""
        records = self.of("step")
        main = [r for r in records if r["optimizer"] == self.first_optimizer]
        others = [[r for r in records if r["optimizer"] == n] for n in {r["optimizer"] for r in records}]
        marks = [r["seq"] for r in main] + [math.inf]
        return [
            _beside(record, [o for o in others if o[0]["optimizer"] != self.first_optimizer], start, end)
            for record, start, end in zip(main, marks[:-1], marks[1:], strict=True)
        ]

    @property
    def end(self) -> Record | None:
        """How the script ended on this rank, if it could still say so."""
        return self.first("end")


def _beside(record: Record, others: list[list[Record]], start: float, end: float) -> Record:
    """A step's record with the state of the optimizers that step between it and the next one.

    The first optimizer is the one that steps first, so another's step of the same iteration comes after it.
    """
    found = [next((r for r in other if start < r["seq"] < end), None) for other in others]
    merged = dict(record)
    for other in [r for r in found if r is not None]:
        for field_ in ("held", "strangers", "lr"):
            merged[field_] = [*merged[field_], *(v for v in other[field_] if field_ == "lr" or v not in merged[field_])]
        merged["state"] = {**other["state"], **merged["state"]}
    return merged


@dataclass(frozen=True)
class Ended:
    """The exit of one rank's process: `code` as in subprocess (negative: signal); `killed`: by the launcher."""

    rank: int
    code: int
    killed: bool
    at: float = math.inf  # on the clock of the records


@dataclass(frozen=True)
class Run:
    """One launch. `role`: train, provoked, repeat, exact, undropped, rounded, reference, envelope, single, original, resume, continued,
    reshard, opened, crash, recovered, damaged, simulate. A simulate run has rank 0 alone.
    """

    role: str
    world_size: int
    traces: tuple[Trace, ...]
    ended: tuple[Ended, ...] = ()
    timed_out: bool = False
    seconds: float = 0.0
    stacks: dict[int, str] = field(default_factory=dict)
    stderr: dict[int, str] = field(default_factory=dict)
    progress: dict[int, list[Record]] = field(
        default_factory=dict
    )  # by rank: events {"op", "frames", "value"}, in order
    command: str = ""
    foreign: str = ""  # what stands in the verifier's own files and is not of the probe: then no record is believed
    note: str = ""  # what was done to it, or to the checkpoint that it finds
    timeout: float = 0.0  # seconds that it had

    @property
    def completed(self) -> bool:
        """Whether every rank came to the end that the verifier or the script had set, without an error."""
        good = all((t.end or {}).get("how") in ("stopped", "return") or _clean_exit(t.end) for t in self.traces)
        return bool(self.traces) and good and not self.timed_out

    @cached_property
    def parameters(self) -> dict[str, list[Record]]:
        """{parameter name: its record on each rank} at the first forward; its replicas are numbered from 0."""
        found: dict[str, list[Record]] = {}
        for trace in self.traces:
            for model in _latest_models(trace):
                for entry in model["parameters"]:
                    found.setdefault(entry["name"], []).append({**entry, "rank": trace.rank})
        for entries in found.values():
            copies = sorted({entry["copy"] for entry in entries})
            for entry in entries:
                entry["copy"] = copies.index(entry["copy"])
        return found

    @cached_property
    def data_ranks(self) -> list[int]:
        """The ranks that differ in their samples: those of rank 0's mesh in `fully_shard`, all if none was given.

        Ranks outside of it (tensor parallelism) work on the samples of one of these.
        """
        meshes = [wrap["mesh"] for wrap in self.places("wrap") if wrap["mesh"] is not None]
        return sorted(max((mesh["ranks"] for mesh in meshes), key=len, default=range(self.world_size)))

    @cached_property
    def models(self) -> list[Record]:
        """The model records of rank 0 (of the first rank that has any)."""
        return next((m for t in self.traces if (m := _latest_models(t))), [])

    def steps(self) -> int:
        """Optimizer steps that every rank has made (of its first optimizer)."""
        return min((len(_of_first_optimizer(t, "stepped")) for t in self.traces), default=0)

    def at_step(self, kind: str, step: int) -> list[Record]:
        """For each rank its record of `kind` ("step" or "stepped") at a step; empty unless all have it."""
        found = [next((r for r in _of_first_optimizer(t, kind) if r["step"] == step), None) for t in self.traces]
        return [r for r in found if r is not None] if all(r is not None for r in found) else []

    def micros(self, step: int) -> list[list[Record]]:
        """For each rank the micro-batches of a step."""
        return [[r for r in t.of("micro") if r["step"] == step] for t in self.traces]

    def objective(self, step: int) -> float | None:
        """The loss whose gradient the step used: the sum over micro-batches and ranks, by what FSDP divides gradients by."""
        micros = self.micros(step)
        per_rank = [[m["loss"] for m in micros[rank]] for rank in self.data_ranks if rank < len(micros)]
        if not per_rank or any(not losses or None in losses for losses in per_rank):
            return None
        return sum(math.fsum(losses) for losses in per_rank) / self.divisor

    @property
    def divisor(self) -> float:
        """What the sum of gradients over ranks is divided by: the number of data ranks, or a factor that the script has set."""
        factors = [float(r["factor"]) for r in self.places("divide")]
        return factors[-1] if factors else float(len(self.data_ranks))

    @property
    def losses(self) -> list[float | None]:
        """`objective` of every step."""
        return [self.objective(step) for step in range(1, self.steps() + 1)]

    def whole(self, kind: str, field: str, step: int) -> dict[str, Sketch | None]:
        """{parameter: sketch of the whole tensor} from the shards of the ranks that hold its first replica."""
        records = self.at_step(kind, step)
        out: dict[str, Sketch | None] = {}
        for record, trace in zip(records, self.traces, strict=False):
            for name, value in record[field].items():
                if self.copy(name, trace.rank) != 0:
                    continue
                if value is None or (name in out and out[name] is None):
                    out[name] = None
                else:
                    out[name] = _add(out.get(name), value)
        return out

    def whole_state(self, field: str, step: int) -> dict[str, Sketch]:
        """`whole` of "weights", or of every tensor of the optimizer's "state" as `parameter.key`, before a step."""
        if field == "weights":
            return {name: value for name, value in self.whole("step", "weights", step).items() if value is not None}
        out: dict[str, Sketch] = {}
        for record, trace in zip(self.at_step("step", step), self.traces, strict=False):
            for name, state in record["state"].items():
                for key, value in state.items():
                    if self.copy(name, trace.rank) != 0:
                        continue
                    if isinstance(value, list):
                        out[f"{name}.{key}"] = _add(out.get(f"{name}.{key}"), value)
                    else:
                        out[f"{name}.{key}"] = [value * value, value, value, value, value]
        return out

    def copy(self, name: str, rank: int) -> int:
        """Which replica of a parameter a rank holds a part of."""
        entry = next((e for e in self.parameters.get(name, []) if e["rank"] == rank), None)
        return int(entry["copy"]) if entry else rank

    def grad_norm(self, step: int, field: str = "grads") -> float | None:
        """Norm of the whole gradient after the last backward of a step (before any clipping)."""
        parts = [g[0] for g in self.whole("step", field, step).values() if g is not None]
        return math.sqrt(math.fsum(parts)) if parts else None

    @property
    def grad_norms(self) -> list[float | None]:
        """`grad_norm` of every step."""
        return [self.grad_norm(step) for step in range(1, self.steps() + 1)]

    def downhill(self) -> bool:
        """Whether the weight changes of all steps together point against the gradients, as those of a run that learns."""
        records = [
            (t, r)
            for s in range(1, self.steps() + 1)
            for t, r in zip(self.traces, self.at_step("stepped", s), strict=True)
        ]
        along = [moved[1] for t, r in records for name, moved in r["moved"].items() if self.copy(name, t.rank) == 0]
        return math.fsum(along) < 0.0

    def rows(self, step: int) -> list[Counter[int]]:
        """For each rank the hashes of the samples that its models saw in a step."""
        return [Counter(row for micro in micros for row in micro["rows"]) for micros in self.micros(step)]

    def global_batch(self, step: int) -> Counter[int]:
        """The hashes of all samples of a step."""
        rows = self.rows(step)
        return sum((rows[rank] for rank in self.data_ranks if rank < len(rows)), Counter())

    def places(self, kind: str) -> Iterator[Record]:
        """Records of a kind on rank 0, the ones that name a line."""
        for trace in self.traces[:1]:
            yield from trace.of(kind)


def read_run(
    folder: Path,
    role: str,
    answer: dict[str, Any],
    world_size: int,
    command: str,
    timeout: float = 0.0,
    secret: str = "",
) -> Run:
    """The run whose ranks wrote into `folder`; `answer` is the launcher's. Only lines with the mark of `secret` are records."""
    found, stacks, errors, progress = {}, {}, {}, {}
    foreign = ""
    for rank in sorted(e["rank"] for e in answer["ranks"]):
        try:
            found[rank] = _read(folder / f"rank{rank}.jsonl", secret)
            progress[rank] = _events(folder / f"rank{rank}.progress")
        except Foreign as error:
            foreign = foreign or str(error)
        stacks[rank] = _text(folder / f"rank{rank}.stacks")
        errors[rank] = _text(folder / f"rank{rank}.err")
    traces = tuple(Trace(rank, () if foreign else tuple(_without_dry_runs(found[rank]))) for rank in stacks)
    ended = tuple(Ended(e["rank"], e["code"], e["killed"], e["at"]) for e in answer["ranks"])
    progress = {} if foreign else progress
    timed_out, seconds = answer["timed_out"], answer["seconds"]
    return Run(
        role,
        world_size,
        traces,
        ended,
        timed_out,
        seconds,
        stacks,
        errors,
        progress,
        command,
        foreign,
        timeout=timeout,
    )


class Foreign(Exception):
    """A line in a file of the verifier that the probe has not written."""


def difference(a: Sketch, b: Sketch) -> float:
    """Estimated |a - b| of two tensors from their sketches (see `probe/sketch.py`)."""
    return math.sqrt(3.0 * math.fsum((x - y) ** 2 for x, y in zip(a[1:], b[1:], strict=True)) / (len(a) - 1))


def _add(a: Sketch | None, b: Sketch) -> Sketch:
    return list(b) if a is None else [x + y for x, y in zip(a, b, strict=True)]


def _of_first_optimizer(trace: Trace, kind: str) -> list[Record]:
    return trace.steps if kind == "step" else [r for r in trace.of(kind) if r["optimizer"] == trace.first_optimizer]


def _latest_models(trace: Trace) -> list[Record]:
    """One record for each root name; a root that took in an earlier one has replaced it."""
    latest: dict[str, Record] = {r["root"]: r for r in trace.of("model")}
    return list(latest.values())


def _clean_exit(end: Record | None) -> bool:
    return end is not None and end["how"] == "sys.exit" and end["code"] == 0


def _read(path: Path, secret: str) -> list[Record]:
    """Whole lines of a trace; a line cut short by a kill is left out."""
    found = []
    for number, line in enumerate(_text(path, limit=None).split("\n")[:-1], 1):
        text, _, seal = line.rpartition("\t")
        if seal != mark(secret, number, text):
            raise Foreign(f"line {number} of {path.name} was not written by the probe")
        try:
            found.append(json.loads(text))
        except ValueError:
            raise Foreign(f"line {number} of {path.name} is no record: the script has changed `json` itself") from None
    return found


def _without_dry_runs(records: list[Record]) -> list[Record]:
    """Micro-batches whose gradients were thrown away before the first step belong to no step.

    A script that throws gradients away again later does so in its loop, where they are missing: there nothing is left out.
    """
    cleared = [r for r in records if r["kind"] == "cleared"]
    if any(r["step"] > 1 for r in cleared):
        return records
    last = max((r["seq"] for r in cleared), default=-1)
    return [r for r in records if r["kind"] != "micro" or r["seq"] > last]


def _events(path: Path) -> list[Record]:
    """The events of a progress log (see probe/hooks_progress.py)."""
    keys: list[Record] = []
    found = []
    try:
        for line in _text(path, limit=None).split("\n")[:-1]:
            if line.startswith("+"):
                keys.append({"op": "", "frames": [], **json.loads(line[1:])})
            else:
                key, _, value = line.partition(" ")
                found.append({**keys[int(key)], "value": int(value) if value else None})
    except (ValueError, IndexError, TypeError):
        raise Foreign(f"{path.name} holds what the probe has not written") from None
    return found


def _text(path: Path, limit: int | None = 20_000) -> str:
    """What is in a file of a run; a run that has made something else of it, or removed it, has left nothing."""
    if not path.is_file():
        return ""
    text = path.read_text(encoding="utf-8", errors="replace")
    return text if limit is None else text[-limit:]
