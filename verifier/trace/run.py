"""What combines the ranks and records of a run: its samples, losses and gradients."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from ..tolerances import CANCELS, SAME_SUMS
from . import events
from .events import Step, Stepped
from .rank import S, Trace
from .recorded import Recorded
from .sketches import Sketch, add, of_number

# Names by which scripts call the dim over which sequences are split: its ranks rightly get the same
# samples (examples with context parallelism).
CONTEXT = {
    "cp",
    "context",
    "context_parallel",
}  # names of a dim of a mesh over which sequences are split


@dataclass(frozen=True)
class Run(Recorded):
    """A launch with the quantities that combine several of its ranks and records."""

    @cached_property
    def data_ranks(self) -> list[int]:
        """The ranks with different samples: those of rank 0's mesh in `fully_shard`, all if none
        was given.

        Other ranks (tensor parallelism) get the samples of one of these. So do those of a
        context-parallel group, see `sequence_groups`.
        """
        meshes = [wrap.mesh for wrap in self.places(events.Wrap) if wrap.mesh is not None]
        # Ranks beside the mesh of fully_shard (tensor parallelism) share the samples of one of its
        # ranks (zoo/tp_fsdp).
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
            # A group named "cp" counts once only if its ranks were really given the same samples
            # (examples of context parallelism).
            if max(g) < len(given) and all(given[r] == given[g[0]] for r in g)
        ]

    @cached_property
    def sample_ranks(self) -> list[int]:
        """The data ranks, of each group that shares its samples the first."""
        others = {rank for group in self.sequence_groups for rank in group[1:]}
        return [rank for rank in self.data_ranks if rank not in others]

    @cached_property
    def changed(self) -> set[str]:
        """The parameters whose weights change in a step, or between two, on rank 0."""
        moved = {
            name
            for record in self.places(Stepped)
            for name, move in record.moved.items()
            if move[2] > 0
        }
        steps = self.places(Step)
        return moved | {
            name
            for a, b in pairwise(steps)
            for name, weight in b.weights.items()
            if weight != a.weights.get(name, weight)
        }

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
            # A loss whose terms cancel is zero but for rounding; the change that a step makes of it
            # is not (zoo/zero_loss) (zoo/zero_loss).
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
        # A script may set the divisor itself (set_gradient_divide_factor): then the sum over ranks
        # is divided by that (zoo scripts with set_gradient_divide_factor; torchtitan).
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
        # A micro-batch whose loss is exactly 0 is a filler that keeps ranks together (round 3 h_18,
        # g_20): it trains on nothing (exam r3 h_18_uneven_audio, g_20_balanced_ragged: fillers).
        counted = [[micro.loss != 0.0 for micro in micros] for micros in all_micros]
        # A rank's part of a sequence may have no target, so no loss: its samples count if any part
        # of the group has (context parallelism).
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
        # A whole graph that every rank is given for its own nodes counts once: equal samples, other
        # losses (exam r5 r_20_node_partition).
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
        # What all ranks are given counts once (a graph) or each time (a part of each group): either
        # may agree with one process.
        return once or each == sum(other._used(step), Counter()) or self.cut_within(step, other)

    def cut_within(self, step: int, other: "Run") -> bool:
        """Whether two runs are given the same numbers in samples of other sizes: ranks that have
        parts of each sample (domains, slabs of a field, stretches of a sequence). What several
        ranks are given, as those of tensor parallelism are, counts once.
        """
        mine, theirs = (_given(run.micros(step)) for run in (self, other))
        rows = sorted((mine.rows, theirs.rows))
        if not rows[0] or rows[1] % rows[0] or rows[0] == rows[1]:
            return False
        apart = max(abs(a - b) for a, b in zip(mine.sums, theirs.sums, strict=True))
        size = max(mine.sums[1], theirs.sums[1])
        return mine.elements == theirs.elements and size > 0.0 and apart <= SAME_SUMS * size

    def _used(self, step: int) -> list[Counter[int]]:
        rows = self.rows(step)
        return [rows[rank] for rank in self.sample_ranks if rank < len(rows)]


@dataclass(frozen=True)
class _Given:
    """All samples of a step: how many rows and elements, and [their sum, that of their absolute
    values].
    """

    rows: int
    elements: float
    sums: list[float]


def _given(micros: list[list[events.Micro]]) -> _Given:
    own = {(at, *m.rows): len(m.rows) for each in micros for at, m in enumerate(each)}
    parts = {tuple(part) for each in micros for m in each for part in m.parts}
    sums = [math.fsum(part[k] for part in parts) for k in (1, 2)]
    return _Given(sum(own.values()), math.fsum(part[0] for part in parts), sums)
