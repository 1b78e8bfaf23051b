"""Rules on initial values: every parameter and buffer has one, and all ranks mean the same model."""

from __future__ import annotations

from ..evidence import LOADS, Evidence
from ..finding import Finding
from ..trace import Record, Run, Sketch, difference
from .base import Rule, count, some

NOT_FILLED = "no run with NaN in the memory that to_empty allocates came to a forward"


class MetaBuffersGarbage(Rule):
    """Every buffer that `to_empty` allocates is written before the first forward.

    Why: `to_empty` gives buffers memory with whatever lay there. A non-persistent buffer (a RoPE table, a causal
    mask) is in no state dict and no `reset_parameters` rebuilds it, so the model runs on garbage: finite, wrong, and
    different on every rank.
    Wrong:
        with torch.device("meta"):
            model = Decoder()
        shard(model)
        model.to_empty(device="cpu")
        model.init_weights()  # parameters only: model.rope is whatever lay in memory
    Right:
        with torch.device("meta"):
            model = Decoder()
        shard(model)
        model.to_empty(device="cpu")
        model.init_weights()
        model.init_buffers()  # recompute what no state dict holds
    Mend: After `to_empty`, recompute every buffer in the function that initialises the parameters.
    Source: huggingface/accelerate PR#3921; hiyouga/LlamaFactory PR#10820; a run of its own (provoked) fills what
    `to_empty` allocates with NaN and looks for it at the first forward.
    Torch: run on 2.13.0.
    """

    name = "meta-buffers-garbage"
    family = "init"
    needs = frozenset({"train", "provoked"})

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        if run is None or not run.models:
            return self.unknown("no forward of a model was seen")
        if run.traces[0].first("to_empty") is None:
            return self.passed("the script allocates no buffer with to_empty")
        if (filled := evidence.provoked) is None or not filled.models:
            return self.unknown(NOT_FILLED)
        bad = [b for m in filled.models for b in m["buffers"] if b["unset"]]
        if not bad:
            return self.passed(f"{count(sum(len(m['buffers']) for m in run.models), 'buffer')} written after to_empty")
        names = some(f"{b['name']} {tuple(b['shape'])}" for b in bad)
        return self.failed(
            f"{names}: allocated by to_empty and never written before the first forward",
            evidence.line_of(run, "to_empty"),
        )


class MetaParamsNotReset(Rule):
    """Every parameter that `to_empty` allocates is written before the first forward.

    Why: an initialisation that visits `nn.Linear` and `nn.Embedding` misses a raw `nn.Parameter`; its values are then
    whatever lay in memory. The loss is NaN, or it falls with one tensor wrong.
    Wrong:
        with torch.device("meta"):
            model = Decoder()
        shard(model)
        model.to_empty(device="cpu")
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                module.reset_parameters()  # model.scale is a raw nn.Parameter: never written
        model.init_buffers()
    Right:
        with torch.device("meta"):
            model = Decoder()
        shard(model)
        model.to_empty(device="cpu")
        model.init_weights()  # walks over named_parameters(), so it writes model.scale too
        model.init_buffers()
    Mend: Initialise by walking over `named_parameters()`, so that none can be left out, or load a checkpoint that
    holds every one.
    Source: ByteDance-Seed/VeOmni#118; pytorch/torchtitan docs/fsdp.md; the probe fills what `to_empty` allocates with
    NaN and looks for it.
    Torch: run on 2.13.0.
    """

    name = "meta-params-not-reset"
    family = "init"
    needs = frozenset({"train", "provoked"})

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        if run is None or not run.models:
            return self.unknown("no forward of a model was seen")
        if run.traces[0].first("to_empty") is None:
            return self.passed("the script allocates no parameter with to_empty")
        if (filled := evidence.provoked) is None or not filled.models:
            return self.unknown(NOT_FILLED)
        bad = {name: sum(e["unset"] for e in entries) for name, entries in filled.parameters.items()}
        bad = {name: unset for name, unset in bad.items() if unset}
        if not bad:
            return self.passed(f"{count(len(run.parameters), 'parameter')} written after to_empty")
        return self.failed(
            f"{some(bad)}: allocated by to_empty and never written before the first forward",
            evidence.line_of(run, "to_empty"),
        )


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
    Mend: Seed alike on every rank before the model is built, and seed by rank only after it is sharded; or broadcast
    rank 0's weights.
    Source: pytorch/torchtitan#1777; allenai/OLMo-core PR#319; FSDP1's `sync_module_states` has no successor in
    `fully_shard`.
    Torch: run on 2.13.0.
    """

    name = "rank-dependent-init-no-broadcast"
    family = "init"
    needs = frozenset({"train", "single"})

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        if run is None or not run.models:
            return self.unknown("no forward of a model was seen")
        if run.world_size == 1:
            return self.unknown("one rank has nobody to differ from")
        line = evidence.line_of(run, "shard")
        if diverged := _replicas_that_differ(run):
            return self.failed(f"{some(diverged)}: ranks that should hold copies hold different initial values", line)
        # What differs between the replicas of a hybrid mesh, and not within one, is hsdp-replicas-diverge-at-init.
        alike = _first_replica(run)
        per_rank = [t.of("shard") for t in run.traces if t.rank in alike]
        if len({len(records) for records in per_rank}) > 1:
            return self.unknown("ranks call fully_shard a different number of times")
        differing = [
            f"{own['name']} of {own['cls'].rpartition('.')[2]}"
            for records in zip(*per_rank, strict=True)
            for entries in zip(*(r["parameters"] for r in records), strict=False)
            for own in entries[:1]
            if any(e["sketch"] != own["sketch"] for e in entries)
        ]
        if not any(record["parameters"] for records in per_rank for record in records):
            if evidence.single is None or not evidence.single.parameters:
                return self.unknown(
                    "the weights are made after sharding, and one process did not make its own to compare"
                )
            if not _as_one_process(run, evidence.single):
                return self.unknown(
                    "the weights are made after sharding, and one process makes others: they depend on the ranks"
                )
            return self.passed("the weights are made after sharding, and one process makes the same")
        if not differing and len(alike) < 2:
            return self.passed("every rank holds a replica of its own: see hsdp-replicas-diverge-at-init")
        if not differing:
            return self.passed(f"equal before sharding on {count(len(alike), 'rank')} that share one replica")
        last_shard = per_rank[0][-1]["seq"]
        first_model = run.models[0]["seq"]
        loaded = [r for r in run.places("checkpoint") if r["op"] in LOADS and last_shard < r["seq"] < first_model]
        if loaded:
            return self.passed(f"ranks differ before sharding, and {loaded[0]['op']} sets all weights after it")
        if (giver := _rank_that_gave_all(run, per_rank)) is not None:
            return self.passed(f"ranks differ before sharding, and the weights of rank {giver} are set on all after it")
        return self.failed(f"before fully_shard the ranks hold different values of {some(differing)}", line)


class DtensorRngIdenticalShardsCpu(Rule):
    """Weights that are drawn on shards are other numbers on every rank.

    Why: the random numbers of a DTensor are told apart by rank on CUDA-like meshes only. On a CPU mesh, or with shards
    that `CPUOffloadPolicy` keeps on the CPU, every rank draws the same ones: the rows of a weight repeat from rank to
    rank, and all that is said is `DTensor random operators may not have complete support on cpu device mesh`.
    Wrong:
        with torch.device("meta"):
            model = Decoder()
        shard(model)
        model.to_empty(device="cpu")
        model.init_weights()  # normal_ on DTensors: the same numbers on every rank
        model.init_buffers()
    Right:
        with torch.device("meta"):
            model = Decoder()
        shard(model)
        model.to_empty(device="cpu")
        for param in model.parameters():
            full = torch.randn(param.shape) * 0.1  # one seed on all ranks: the same full tensor
            param.data.copy_(distribute_tensor(full, param.device_mesh, param.placements))
        model.init_buffers()
    Mend: On a CPU mesh draw the full tensor with one seed and take this rank's part (`distribute_tensor`), or
    initialise before sharding.
    Source: pytorch/torchtitan#3106, PR#4600; the warning of torch's DTensor RNG on a CPU mesh.
    Torch: run on 2.13.0.
    """

    name = "dtensor-rng-identical-shards-cpu"
    family = "init"

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        if run is None or not run.models:
            return self.unknown("no forward of a model was seen")
        if run.world_size == 1:
            return self.unknown("one rank has no other's shard to compare")
        telling, same = [], []
        for name, entries in run.parameters.items():
            shards = _digests(
                run, name, [e["rank"] for e in entries if e["sharded"] and e["copy"] == entries[0]["copy"]]
            )
            if len(shards) > 1 and all(shards):
                telling.append(name)
                if len(set(shards)) == 1:
                    same.append(name)
        if not telling:
            return self.passed("no parameter has large shards on several ranks")
        if 2 * len(same) < len(telling):
            return self.passed(f"{count(len(telling), 'parameter')} with other values on every rank")
        drawn = evidence.line_of(run, "to_empty") or evidence.line_of(run, "shard", last=True)
        return self.failed(
            f"{count(len(same), 'parameter')} of {len(telling)} ({some(same)}) have bit for bit the same shard on every "
            "rank at the first forward",
            drawn,
        )


class Rank0SdWithoutBroadcast(Rule):
    """A state dict that only rank 0 holds is set with `broadcast_from_rank0=True`.

    Why: `set_model_state_dict` is a collective. If rank 0 has read the file and the others hold an empty dict, the
    others raise or do nothing while rank 0 waits for them: a time-out, or `Connection closed by peer`.
    Wrong:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        state = state if dist.get_rank() == 0 else {}
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
    Right:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        state = state if dist.get_rank() == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state, options=options)
    Mend: Pass `StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)`.
    Source: verl-project/verl#6365; axolotl-ai-cloud/axolotl#3476; huggingface/accelerate PR#3921.
    Torch: run on 2.13.0.
    """

    name = "rank0-sd-without-broadcast"
    family = "init"
    reads = frozenset({"resume"})

    def judge(self, evidence: Evidence) -> Finding:
        if evidence.train is None or not evidence.train.traces:
            return self.unknown("the script was not run")
        calls = 0
        for run in (evidence.train, evidence.resume):
            if run is None:
                continue
            per_rank = [t.of("set_state") for t in run.traces]
            for records in zip(*per_rank, strict=False):
                calls += 1
                empty = [trace.rank for trace, r in zip(run.traces, records, strict=True) if r["given"] == 0]
                if empty and len(empty) < len(records) and not all(r["broadcast"] for r in records):
                    full = next(r for r in records if r["given"])
                    return self.failed(
                        f"{full['op']} is given {count(full['given'], 'key')} on some ranks and none on "
                        f"{count(len(empty), 'rank')} (first: rank {empty[0]}), without broadcast_from_rank0",
                        full["at_line"],
                    )
        if not calls and not evidence.train.models:
            return self.unknown("no forward of a model was seen")
        return self.passed(
            f"every rank gave keys, or rank 0 broadcast them, in {count(calls, 'call')}" if calls else NO_SETTER
        )


NO_SETTER = "the script sets no state dict with torch's setters"


def _digests(run: Run, name: str, ranks: list[int]) -> list[str | None]:
    """The digest of a parameter's shard at the first forward on each of `ranks`."""
    found = {t.rank: digests for t in run.traces for r in t.of("shards") if name in (digests := r["digests"])}
    return [found.get(rank, {}).get(name) for rank in ranks]


def _as_one_process(run: Run, single: Run) -> bool:
    """Whether one process, initialising by itself, comes to the same weights."""
    alone = {name: entries[0]["sketch"] for name, entries in single.parameters.items()}
    sharded = _whole(run)
    return all(name in alone and _near(sharded[name], alone[name]) for name in sharded)


def _rank_that_gave_all(run: Run, per_rank: list[list[Record]]) -> int | None:
    """The rank whose weights from before sharding are, all of them, the model's at the first forward."""
    now = list(_whole(run).values())
    for rank, records in enumerate(per_rank):
        before = [entry["sketch"] for record in records for entry in record["parameters"]]
        if all(any(_near(value, kept) for value in now) for kept in before):
            return rank
    return None


def _whole(run: Run) -> dict[str, Sketch]:
    """The sketch of each whole parameter at the first forward."""
    return {
        name: [sum(column) for column in zip(*(e["sketch"] for e in entries if e["copy"] == 0), strict=True)]
        for name, entries in run.parameters.items()
    }


def _near(a: Sketch, b: Sketch) -> bool:
    return difference(a, b) <= 1e-9 * (1.0 + b[0])


def _first_replica(run: Run) -> list[int]:
    """The ranks that hold the first replica of the sharded parameters, all ranks if nothing is sharded."""
    entries = next((e for e in run.parameters.values() if e[0]["sharded"]), None)
    if entries is None:
        return list(range(run.world_size))
    return [e["rank"] for e in entries if e["copy"] == entries[0]["copy"]]


def _replicas_that_differ(run: Run) -> list[str]:
    """Plain parameters of which two ranks hold other values at the first forward."""
    out = []
    for name, entries in run.parameters.items():
        first, *others = [entry["sketch"] for entry in entries if not entry["sharded"]] or [[0.0] * 5]
        if any(difference(first, other) > 1e-9 * (1.0 + first[0] ** 0.5) for other in others):
            out.append(name)
    return out


RULES = (
    Rank0SdWithoutBroadcast,
    MetaBuffersGarbage,
    MetaParamsNotReset,
    DtensorRngIdenticalShardsCpu,
    RankDependentInitNoBroadcast,
)
