import math

from ...analysis.unusual_parallelism import (
    PARTS_OR_COPIES,
    divided_by_script,
    parts_or_copies,
    replicas_that_differ,
)
from ...evidence import LOADS, Evidence
from ...source.events import Event, Flow, covers
from ...source.flow_queries import is_known, made_by, text
from ...source.values import GLOBAL, Value
from ...tolerances import HELD_IN_BFLOAT16
from ...trace import Run, Sketch, difference
from ...trace.events import Checkpoint, Shard, ShardedParameter
from ..base import Finding, Hits, Rule, count, some

_LOADS = ("dsd.set_model_state_dict", "dsd.set_state_dict", "dcp.load")
_SETS_ALL = (
    "dist.broadcast",
    "tensor.distribute_tensor",
    "dist.broadcast_object_list",
    "dist._broadcast_coalesced",
)
_WRITES = (
    "load_state_dict",
    "apply",
    "parameters",
    "named_parameters",
    "modules",
    "named_modules",
    "state_dict",
)


class RankDependentInitNoBroadcast(Rule):
    """All ranks shard the same initial weights.

    Why: `fully_shard` neither broadcasts nor compares. If ranks build different weights
    (`manual_seed(seed + rank)` before the model), each shards its own: no other world size
    reproduces the model, and HSDP's replicas never agree.
    Wrong:
        torch.manual_seed(seed + dist.get_rank())
        model = Decoder()
        shard(model)
    Right:
        torch.manual_seed(seed)
        model = Decoder()
        shard(model)
        torch.manual_seed(seed + dist.get_rank())  # from here on ranks may differ, for dropout
    Fix: Use one seed on all ranks until the model is sharded, seed by rank after that; or broadcast
    rank 0's weights.
    Source: pytorch/torchtitan#1777; allenai/OLMo-core PR#319; `fully_shard` has no
    `sync_module_states` (FSDP1).
    """

    needs = frozenset({"train", "single"})
    wants = "models"

    def applies(self, evidence: Evidence) -> str:
        run = evidence.trained
        before = any(record.parameters for record in run.all(Shard))
        if (
            run.world_size == 1
            or not before
            or len(_first_replica(run)) > 1
            or replicas_that_differ(run)
        ):
            return ""
        return "every rank holds a full replica: see hsdp-replicas-diverge-at-init"

    def unseen(self, evidence: Evidence) -> str:
        return (
            "one rank has no other to compare with: give --nproc 2"
            if evidence.trained.world_size == 1
            else ""
        )

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        line = run.line_of(Shard)
        own = divided_by_script(evidence)
        # A table of which the script gives each rank a part has other values on each, rightly (exam
        # round 6 w_14_rowparallel_table).
        if diverged := [name for name in replicas_that_differ(run) if name not in own]:
            if {*diverged} <= parts_or_copies(evidence):
                return self.unknown(f"{some(diverged)} differ between ranks: {PARTS_OR_COPIES}")
            return self.failed(
                f"{some(diverged)}: replicas on different ranks have different initial values", line
            )
        # What differs between replicas of a hybrid mesh, and not within one, is
        # hsdp-replicas-diverge-at-init's (zoo/hsdp.py).
        alike = _first_replica(run)
        per_rank = [t.of(Shard) for t in run.traces if t.rank in alike]
        if len({len(records) for records in per_rank}) > 1:
            return self.unknown("ranks call fully_shard a different number of times")
        if not any(record.parameters for records in per_rank for record in records):
            return self._initialised_late(evidence)
        differing = _that_differ(per_rank)
        if not differing:
            return self.passed(
                f"equal before sharding on the {count(len(alike), 'rank')} of one replica"
            )
        if not (differing := [one for one in differing if not _written_again(run, one)]):
            return self.passed("different on the ranks before sharding, and written again after it")
        if after := _set_after(evidence, per_rank):
            return self.passed(f"different on the ranks before sharding, but {after}")
        names = [f"{one.name} of {one.cls.rpartition('.')[2]}" for one in differing]
        return self.failed(
            f"before fully_shard the ranks hold different values of {some(names)}", line
        )

    def _initialised_late(self, evidence: Evidence) -> Finding:
        """Weights that are made on shards cannot be compared before it: one process with the same
        begins shows that they do not depend on the ranks (weights made after sharding).
        """
        late = "the weights are initialised after sharding"
        if evidence.single is None or not evidence.single.parameters:
            lacks = f"{late}, and no single-process run initialised its own to compare with"
            return self.unknown(evidence.missing.get("single", lacks))
        if not _as_one_process(evidence.trained, evidence.single):
            return self.unknown(
                f"{late}, and a single process initialises others: they depend on the world size"
            )
        return self.passed(f"{late}, and a single process initialises the same")

    def detect(self, flow: Flow) -> Hits:
        # Calls that set all weights later (broadcasts, distribute_tensor, to_empty with a load)
        # make the first values of no matter (zoo/broadcast_from_rank0.py, zoo/meta_init_rope.py).
        if not flow.certain or flow.ops(*_SETS_ALL) or flow.methods("to_empty"):
            return
        seeds = flow.ops("torch.manual_seed", "torch.random.manual_seed")
        for root in flow.roots.values():
            shard, born = flow.first_shard.get(id(root)), root.event
            if (
                shard is None
                or born is None
                or not is_known(flow, root)
                or any(map(_may_be_meta, born.withs))
            ):
                continue
            seed = next((e for e in reversed(seeds) if e.index < born.index), None)
            if (
                seed is None
                or not seed.args
                or seed.args[0].rank != GLOBAL
                or seed.withs
                or not covers(seed, born)
            ):
                continue
            loads = [*flow.ops(*_LOADS), *flow.methods("load_state_dict")]
            loaded = any(e.index > shard.index and not e.guards for e in loads)
            if not loaded and not flow.escapes(root) and not _written(flow, root, born, shard):
                yield (
                    (
                        f"{text(seed.node)} before the model is built: every rank shards different"
                        " initial weights"
                    ),
                    seed,
                )


def _written_again(run: Run, entry: ShardedParameter) -> bool:
    """Whether a script initialises a parameter once more when it is sharded (Modalities): all that
    may be it, since `fully_shard` on a block knows the names inside it alone.
    """
    own = [e for name, e in run.parameters.items() if f".{name}".endswith(f".{entry.name}")]
    return bool(own) and all(one.written for entries in own for one in entries)


def _that_differ(per_rank: list[list[Shard]]) -> list[ShardedParameter]:
    """The parameters of which the ranks hold different values before they are sharded."""
    differing = []
    for records in zip(*per_rank, strict=True):
        for own, *others in zip(*(record.parameters for record in records), strict=False):
            if any(entry.sketch != own.sketch for entry in others):
                differing.append(own)
    return differing


def _set_after(evidence: Evidence, per_rank: list[list[Shard]]) -> str:
    """What sets all weights after the sharding, in words; "" if nothing does."""
    run = evidence.trained
    last_shard, first_model = per_rank[0][-1].seq, run.models[0].seq
    # A load after the sharding and before the first forward sets all weights: what ranks held
    # before is gone (zoo/checkpoint_*.py; zoo/broadcast_from_rank0.py).
    for record in run.places(Checkpoint):
        if record.op in LOADS and last_shard < record.seq < first_model:
            return f"{record.op} sets all weights after it"
    # If all weights of one rank from before the sharding are the model's at the first forward,
    # they were set on all (zoo/broadcast_from_rank0.py).
    if (giver := _rank_that_gave_all(run, per_rank)) is not None:
        return f"rank {giver}'s are set on all after it"
    # Memory of torch.empty differs between ranks until it is set on shards: if one process
    # begins with the same weights, it was set (one right script judged again (weights by
    # torch.empty; reliability.md 'One had failed')).
    if evidence.single is not None and _as_one_process(run, evidence.single):
        return "set after it: a single process begins with the same"
    return ""


def _as_one_process(run: Run, single: Run) -> bool:
    """Whether one process, initialising by itself, comes to the same weights."""
    alone = {name: entries[0] for name, entries in single.parameters.items()}

    def same(name: str, value: Sketch) -> bool:
        # the oracle's are wider
        if name in alone and alone[name].dtype != run.parameters[name][0].dtype:
            return difference(value, alone[name].sketch) <= HELD_IN_BFLOAT16 * math.sqrt(
                alone[name].sketch[0]
            )
        return name in alone and _near(value, alone[name].sketch)

    whole = _whole(run)
    return bool(whole) and all(same(name, value) for name, value in whole.items())


def _rank_that_gave_all(run: Run, per_rank: list[list[Shard]]) -> int | None:
    """The rank whose weights from before sharding are, all of them, the model's at the first
    forward.
    """
    now = list(_whole(run).values())
    for rank, records in enumerate(per_rank):
        before = [entry.sketch for record in records for entry in record.parameters]
        if all(any(_near(value, kept) for value in now) for kept in before):
            return rank
    return None


def _whole(run: Run) -> dict[str, Sketch]:
    """The sketch of each whole parameter at the first forward."""
    return {
        name: [
            sum(column) for column in zip(*(e.sketch for e in entries if e.copy == 0), strict=True)
        ]
        for name, entries in run.parameters.items()
    }


def _near(a: Sketch, b: Sketch) -> bool:
    # The same float32 values summed in float64 by other shards: only the order of summation
    # differs, 1e-9 at most.
    return difference(a, b) <= 1e-9 * (1.0 + b[0])


def _first_replica(run: Run) -> list[int]:
    """The ranks that hold the first replica of the sharded parameters, all ranks if nothing is
    sharded.
    """
    entries = next((e for e in run.parameters.values() if e[0].sharded), None)
    return (
        list(range(run.world_size))
        if entries is None
        else [e.rank for e in entries if e.copy == entries[0].copy]
    )


def _written(flow: Flow, root: Value, born: Event, shard: Event) -> bool:
    """Whether the weights are written again between construction and sharding."""
    between = flow.events[born.index + 1 : shard.index]
    inits = any(
        e.op.startswith("torch.nn.init.") and not e.function.endswith("__init__") for e in between
    )
    return inits or any(e.method in _WRITES and e.on is root for e in between)


def _may_be_meta(context: Value) -> bool:
    """Whether a context is `torch.device("meta")`, or may be."""
    device = made_by(context, "torch.device")
    return (
        device is None
        or not device.args
        or device.args[0].const == "meta"
        or device.args[0].kind != "const"
    )
