from collections.abc import Iterator

from ...analysis.wording import count, some
from ...evidence import LOADS, Evidence
from ...finding import Finding, Hit
from ...source.events import Event, Flow, covers
from ...source.looks import is_known, made_by, text
from ...source.registry import detector
from ...source.values import GLOBAL, Value
from ...trace import Run, Sketch, difference
from ...trace.events import Checkpoint, Shard
from ..base import Rule


class RankDependentInitNoBroadcast(Rule):
    """All ranks shard the same initial weights.

    Why: `fully_shard` neither broadcasts nor compares. If ranks build different weights (`manual_seed(seed + rank)`
    before the model), each keeps its slice of its own: the model is a patchwork that no other world size reproduces,
    and with HSDP the replicas differ for ever.
    Wrong:
        torch.manual_seed(seed + dist.get_rank())
        model = Decoder()
        shard(model)
    Right:
        torch.manual_seed(seed)
        model = Decoder()
        shard(model)
        torch.manual_seed(seed + dist.get_rank())  # from here on ranks may differ, for dropout
    Fix: Seed alike on every rank before the model is built, and seed by rank only after it is sharded; or broadcast
    rank 0's weights.
    Source: pytorch/torchtitan#1777; allenai/OLMo-core PR#319; FSDP1's `sync_module_states` has no successor in
    `fully_shard`.
    """

    needs = frozenset({"train", "single"})
    wants = "models"

    def applies(self, evidence: Evidence) -> str:
        run = evidence.trained
        before = any(record.parameters for trace in run.traces for record in trace.of(Shard))
        if run.world_size == 1 or not before or len(_first_replica(run)) > 1 or _replicas_that_differ(run):
            return ""
        return "every rank holds a replica of its own: see hsdp-replicas-diverge-at-init"

    def unseen(self, evidence: Evidence) -> str:
        return "one rank has nobody to differ from: give --nproc 2" if evidence.trained.world_size == 1 else ""

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        line = evidence.line_of(run, Shard)
        if diverged := _replicas_that_differ(run):
            return self.failed(f"{some(diverged)}: ranks that should hold copies hold different initial values", line)
        # What differs between the replicas of a hybrid mesh, and not within one, is hsdp-replicas-diverge-at-init.
        alike = _first_replica(run)
        per_rank = [t.of(Shard) for t in run.traces if t.rank in alike]
        if len({len(records) for records in per_rank}) > 1:
            return self.unknown("ranks call fully_shard a different number of times")
        differing = [
            f"{own.name} of {own.cls.rpartition('.')[2]}"
            for records in zip(*per_rank, strict=True)
            for entries in zip(*(r.parameters for r in records), strict=False)
            for own in entries[:1]
            if any(e.sketch != own.sketch for e in entries)
        ]
        if not any(record.parameters for records in per_rank for record in records):
            if evidence.single is None or not evidence.single.parameters:
                return self.unknown(
                    "the weights are made after sharding, and one process did not make its own to compare"
                )
            if not _as_one_process(run, evidence.single):
                return self.unknown(
                    "the weights are made after sharding, and one process makes others: they depend on the ranks"
                )
            return self.passed("the weights are made after sharding, and one process makes the same")
        if not differing:
            return self.passed(f"equal before sharding on {count(len(alike), 'rank')} that share one replica")
        last_shard = per_rank[0][-1].seq
        first_model = run.models[0].seq
        loaded = [r for r in run.places(Checkpoint) if r.op in LOADS and last_shard < r.seq < first_model]
        if loaded:
            return self.passed(f"ranks differ before sharding, and {loaded[0].op} sets all weights after it")
        if (giver := _rank_that_gave_all(run, per_rank)) is not None:
            return self.passed(f"ranks differ before sharding, and the weights of rank {giver} are set on all after it")
        return self.failed(f"before fully_shard the ranks hold different values of {some(differing)}", line)


def _as_one_process(run: Run, single: Run) -> bool:
    """Whether one process, initialising by itself, comes to the same weights."""
    alone = {name: entries[0].sketch for name, entries in single.parameters.items()}
    sharded = _whole(run)
    return all(name in alone and _near(sharded[name], alone[name]) for name in sharded)


def _rank_that_gave_all(run: Run, per_rank: list[list[Shard]]) -> int | None:
    """The rank whose weights from before sharding are, all of them, the model's at the first forward."""
    now = list(_whole(run).values())
    for rank, records in enumerate(per_rank):
        before = [entry.sketch for record in records for entry in record.parameters]
        if all(any(_near(value, kept) for value in now) for kept in before):
            return rank
    return None


def _whole(run: Run) -> dict[str, Sketch]:
    """The sketch of each whole parameter at the first forward."""
    return {
        name: [sum(column) for column in zip(*(e.sketch for e in entries if e.copy == 0), strict=True)]
        for name, entries in run.parameters.items()
    }


def _near(a: Sketch, b: Sketch) -> bool:
    return difference(a, b) <= 1e-9 * (1.0 + b[0])


def _first_replica(run: Run) -> list[int]:
    """The ranks that hold the first replica of the sharded parameters, all ranks if nothing is sharded."""
    entries = next((e for e in run.parameters.values() if e[0].sharded), None)
    if entries is None:
        return list(range(run.world_size))
    return [e.rank for e in entries if e.copy == entries[0].copy]


def _replicas_that_differ(run: Run) -> list[str]:
    """Plain parameters of which two ranks hold other values at the first forward."""
    out = []
    for name, entries in run.parameters.items():
        first, *others = [entry.sketch for entry in entries if not entry.sharded] or [[0.0] * 5]
        if any(difference(first, other) > 1e-9 * (1.0 + first[0] ** 0.5) for other in others):
            out.append(name)
    return out


_SETS_ALL = ("dist.broadcast", "tensor.distribute_tensor", "dist.broadcast_object_list", "dist._broadcast_coalesced")


@detector("rank-dependent-init-no-broadcast")
def rank_dependent_init(flow: Flow) -> Iterator[Hit]:
    if not flow.certain or flow.ops(*_SETS_ALL) or flow.methods("to_empty"):
        return
    seeds = flow.ops("torch.manual_seed", "torch.random.manual_seed")
    for root in flow.roots.values():
        shard, born = flow.first_shard.get(id(root)), root.event
        if shard is None or born is None or not is_known(flow, root) or _on_meta(born):
            continue
        before = [e for e in seeds if e.index < born.index]
        if not before or not before[-1].args or before[-1].args[0].rank != GLOBAL or before[-1].withs:
            continue
        loaded = [e for e in _loads(flow) if e.index > shard.index and not e.guards]
        if not loaded and covers(before[-1], born) and not flow.escapes(root) and not _written(flow, root, born, shard):
            told = f"{text(before[-1].node)} stands before the model is built: every rank makes other weights and keeps its slice of them"
            yield flow.hit("rank-dependent-init-no-broadcast", told, before[-1])


def _loads(flow: Flow) -> list[Event]:
    names = ("dsd.set_model_state_dict", "dsd.set_state_dict", "dcp.load")
    return [*flow.ops(*names), *flow.methods("load_state_dict")]


def _written(flow: Flow, root: Value, born: Event, shard: Event) -> bool:
    """Whether the weights are written again between construction and sharding."""
    own = ("load_state_dict", "apply", "parameters", "named_parameters", "modules", "named_modules", "state_dict")
    between = flow.events[born.index + 1 : shard.index]
    inits = any(e.op.startswith("torch.nn.init.") and not e.function.endswith("__init__") for e in between)
    return inits or any(e.method in own and e.on is root for e in between)


def _on_meta(event: Event) -> bool:
    """Whether something is made under `torch.device("meta")`, or may be."""
    for context in event.withs:
        device = made_by(context, "torch.device")
        if device is None or not device.args or device.args[0].const == "meta" or device.args[0].kind != "const":
            return True
    return False
