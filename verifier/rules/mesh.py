"""Rules on meshes with more than one dim: replicas, their names, and what tensor parallelism asks of data and weights."""

from __future__ import annotations

import math
import re

from ..evidence import Evidence
from ..finding import Finding
from ..trace import Record, Run, Sketch, difference
from .base import Rule, count, some

NO_REPLICAS = "no parameter is replicated: the mesh of fully_shard has one dim"


class HsdpReplicasDivergeAtInit(Rule):
    """With a hybrid mesh all replicas start from the same weights.

    Why: the replicate dim of the mesh is a label. `fully_shard` neither broadcasts nor compares; replicas that start
    apart get equal gradients ever after and stay apart. A restart repairs it, as a checkpoint keeps one of them.
    Wrong:
        replica = mesh["dp_replicate"].get_local_rank()
        torch.manual_seed(seed + replica)  # another model in every replica
        model = shard(Decoder(), mesh=mesh)
    Right:
        torch.manual_seed(seed)
        model = shard(Decoder(), mesh=mesh)
    Mend: Seed alike on every rank before the model is built, or broadcast rank 0's weights
    (`set_model_state_dict` with `broadcast_from_rank0=True`).
    Source: allenai/OLMo-core PR#319; mosaicml/llm-foundry PR#830.
    Torch: run on 2.13.0.
    """

    name = "hsdp-replicas-diverge-at-init"
    family = "mesh"

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        if run is None or not run.models:
            return self.unknown("no forward of a model was seen")
        replicas = _replicas(run, {name: [e["sketch"] for e in entries] for name, entries in run.parameters.items()})
        if not replicas:
            return self.passed(NO_REPLICAS)
        if apart := _apart(replicas):
            return self.failed(
                f"{count(len(apart), 'parameter')} of {len(replicas)} ({some(apart)}) are not the same in all "
                f"{max(len(r) for r in replicas.values())} replicas at the first forward",
                evidence.line_of(run, "shard"),
            )
        return self.passed(f"{count(len(replicas), 'parameter')} equal in all replicas at the first forward")


class MeshArgumentWrong(Rule):
    """A mesh with two dims for `fully_shard` is (replicate, shard), and holds no dim of another parallelism.

    Why: `fully_shard` goes by position, not by name: dim 0 replicates, dim 1 shards. A mesh named the other way round
    replicates over what is called shard. A whole ("dp", "tp") mesh makes hybrid sharding over the tp dim: there is no
    tensor parallelism, and ranks of one tp group average gradients of samples that are the same.
    Wrong:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_shard", "dp_replicate"))
        model = shard(Decoder(), mesh=mesh)
    Right:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
        model = shard(Decoder(), mesh=mesh)
    Mend: Name and order the mesh ("dp_replicate", "dp_shard"[, "tp"]) and give `fully_shard` its data-parallel part only.
    Source: the docstring of `fully_shard` against pytorch/torchtitan docs/fsdp.md; pytorch#124019.
    Torch: run on 2.13.0.
    """

    name = "mesh-argument-wrong"
    family = "mesh"
    simulated = True
    shards = re.compile(r"shard|fsdp", re.I)
    replicates = re.compile(r"repl|ddp", re.I)
    foreign = re.compile(r"^(tp|tensor|tensor_parallel|model_parallel|pp|pipe|pipeline|pipeline_parallel)$", re.I)

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        if run is None or not run.traces:
            return self.unknown("the script was not run")
        wraps = list(run.places("wrap"))
        if not wraps and not run.models:
            return self.unknown("no fully_shard and no forward of a model was seen")
        for record in wraps:
            mesh = record["mesh"]
            if mesh is None or len(mesh["names"]) != 2 or record["explicit_dims"]:
                continue
            first, second = mesh["names"]
            if max(mesh["shape"]) == 1:
                continue
            told = f"fully_shard is given a mesh of {first}={mesh['shape'][0]} x {second}={mesh['shape'][1]}"
            if strange := next((name for name in (first, second) if self.foreign.search(name)), None):
                return self.failed(
                    f"{told}: it replicates over '{first}' and shards over '{second}', and '{strange}' is no data-parallel dim",
                    record["at_line"],
                )
            reversed_names = self.shards.search(first) and not self.replicates.search(first)
            if reversed_names and self.replicates.search(second):
                return self.failed(
                    f"{told}: it replicates over the first dim, '{first}', and shards over the second, '{second}'",
                    record["at_line"],
                )
        two = next((r["mesh"] for r in wraps if r["mesh"] and len(r["mesh"]["shape"]) == 2), None)
        if two is None:
            return self.passed("fully_shard is given meshes of one dim")
        return self.passed(f"fully_shard replicates over dim 0 and shards over dim 1 of {two['names'] or two['shape']}")


class HsdpAllReduceLeftOff(Rule):
    """Every optimizer step of a hybrid mesh uses gradients that were all-reduced over the replicas.

    Why: with `set_requires_all_reduce(False)` the gradients of the replicas are kept apart. If the last micro-batch
    does not turn it on again, FSDP holds them back: `.grad` is None and the step changes nothing; if only some are
    reduced, the replicas drift apart.
    Wrong:
        model.set_requires_all_reduce(False)
        for micro in micros:
            loss_of(model, micro).backward()
        optimizer.step()
    Right:
        for i, micro in enumerate(micros):
            model.set_requires_all_reduce(i == len(micros) - 1)
            loss_of(model, micro).backward()
        optimizer.step()
    Mend: Set the flag before every micro-batch, to whether it is the last one of this step.
    Source: NVIDIA-NeMo/Automodel PR#3135; pytorch PR#125484; the docstring of `set_requires_all_reduce`.
    Torch: run on 2.13.0.
    """

    name = "hsdp-all-reduce-left-off"
    family = "mesh"

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        if run is None or run.steps() == 0:
            return self.unknown("no optimizer step was seen")
        flags = sum(not r["value"] for r in run.places("all_reduce"))
        line = evidence.line_of(run, "all_reduce", last=True) or evidence.line_of(run, "step")
        held = next((r for t in run.traces for r in t.of("partial") if r["step"] <= run.steps()), None)
        if held is not None:
            return self.failed(
                f"at step {held['step']} FSDP still holds back gradients of {count(len(held['groups']), 'group')} that "
                f"were reduced in their replica and not over the replicas ({count(flags, 'call')} turned it off)",
                line,
            )
        before = _replicas(run, {name: [e["sketch"] for e in entries] for name, entries in run.parameters.items()})
        if not before:
            return self.passed(NO_REPLICAS)
        same = set(before) - set(_apart(before))
        for step in range(1, run.steps() + 1):
            records = run.at_step("stepped", step)
            weights = {
                name: [records[e["rank"]]["weights"].get(name, e["sketch"]) for e in run.parameters[name]]
                for name in same
            }
            if apart := _apart(_replicas(run, weights)):
                return self.failed(
                    f"after step {step} the replicas of {count(len(apart), 'parameter')} ({some(apart)}) differ, which "
                    "were the same before it: their gradients were not all-reduced",
                    line,
                )
        return self.passed(
            f"{count(len(same), 'parameter')} equal in all replicas after each of {count(run.steps(), 'step')}"
        )


class SamplerRankIgnoresMesh(Rule):
    """The ranks of one tensor-parallel group train on the same samples.

    Why: with tensor parallelism the ranks of a group hold parts of one model and must be given one batch. A sampler
    that goes by the global rank gives each its own: the parts of activations of different samples are added up, and
    nothing is raised.
    Wrong:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        tokens = dataset[rank::ranks]  # another slice on every rank of a tp group
    Right:
        mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
        tokens = dataset[mesh["dp"].get_local_rank() :: mesh["dp"].size()]
    Mend: Give the sampler `mesh["dp"].get_local_rank()` and `mesh["dp"].size()`, not the global rank and world size.
    Source: huggingface/accelerate#3092; measured on (dp, tp) = (2, 2).
    Torch: run on 2.13.0.
    """

    name = "sampler-rank-ignores-mesh"
    family = "mesh"

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        if run is None or run.steps() == 0:
            return self.unknown("no optimizer step was seen")
        groups = _tensor_parallel_groups(run)
        if not groups:
            return self.passed("no parameter is sharded over a tensor-parallel dim beside the mesh of fully_shard")
        if any(t.first("sharded_input") for t in run.traces):
            return self.unknown("the model is given DTensors, whose samples cannot be compared")
        for step in range(1, run.steps() + 1):
            rows = run.rows(step)
            for group in groups:
                other = next((rank for rank in group[1:] if rows[rank] != rows[group[0]]), None)
                if other is not None:
                    shared = (rows[other] & rows[group[0]]).total()
                    return self.failed(
                        f"ranks {group[0]} and {other} hold parts of the same layers, and at step {step} they are given "
                        f"different samples ({shared} of {rows[group[0]].total()} are the same)",
                        evidence.line_of(run, "micro"),
                    )
        if not any(rows.total() for rows in run.rows(1)):
            return self.unknown("the model was given no tensor whose rows could be told apart")
        return self.passed(f"the same samples on the ranks of each of {count(len(groups), 'tensor-parallel group')}")


class TpFsdpPermutedWeights(Rule):
    """Weights come back from a checkpoint in the order in which they were saved.

    Why: under tensor parallelism and FSDP the shards of a weight do not lie in the order of the ranks (FSDP cuts what
    tensor parallelism has cut before). Code that gathers local shards and joins them by rank, or cuts a fused weight
    anew, permutes rows: every value is there, the shape fits, nothing is raised, and the model has forgotten all.
    Wrong:
        weight = model.head.weight
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, weight.to_local())
        full = torch.cat(parts)  # by rank, whatever the mesh
    Right:
        full = model.head.weight.full_tensor()
    Mend: Gather with `full_tensor()` or `get_model_state_dict(full_state_dict=True)`, and cut with `distribute_tensor`
    or `set_model_state_dict`; do not join local shards by hand.
    Source: pytorch#129206, PR#130760; pytorch/torchtitan PR#1483.
    Torch: run on 2.13.0.
    """

    name = "tp-fsdp-permuted-weights"
    family = "mesh"
    needs = frozenset({"train", "resume", "continued", "reshard"})

    def judge(self, evidence: Evidence) -> Finding:
        after = evidence.saved_after()
        train = evidence.train
        if train is None or (evidence.resume is None and not evidence.reshards):
            return self.unknown(evidence.missing.get("resume", "the script was not resumed"))
        if after is None:
            return self.unknown("the train run saved nothing before its last step")
        saved = train.whole_state("weights", after + 1)
        looked = 0
        for run in (evidence.resume, *evidence.reshards):
            if run is None or not run.at_step("step", 1):
                continue
            mine = run.whole_state("weights", 1)
            looked += 1
            wrong = [name for name, a in saved.items() if (b := mine.get(name)) is not None and _permuted(a, b)]
            if wrong:
                return self.failed(
                    f"after the resume on {count(run.world_size, 'rank')} {count(len(wrong), 'parameter')} of {len(saved)} "
                    f"({some(wrong)}) hold the values that were saved, in another order",
                    evidence.line_of(train, "checkpoint") or evidence.line_of(run, "checkpoint"),
                )
        if not looked or not saved:
            return self.unknown("no resumed run came to an optimizer step")
        return self.passed(
            f"no parameter of {len(saved)} holds its saved values in another order, in {count(looked, 'resumed run')}"
        )


def _replicas(run: Run, sketches: dict[str, list[Sketch]]) -> dict[str, list[Sketch]]:
    """{parameter: sketch of each of its replicas} for those that one mesh shards or keeps in several copies.

    `sketches` are in the order of `run.parameters[name]`.
    """
    out: dict[str, list[Sketch]] = {}
    for name, values in sketches.items():
        copies: dict[int, Sketch] = {}
        entries = run.parameters[name]
        for entry, value in zip(entries, values, strict=True):
            if not entry["sharded"] or entry["ranks"] != entries[0]["ranks"]:
                continue
            so_far = copies.get(entry["copy"], [0.0] * len(value))
            copies[entry["copy"]] = [a + b for a, b in zip(so_far, value, strict=True)]
        if len(copies) > 1:
            out[name] = list(copies.values())
    return out


def _apart(replicas: dict[str, list[Sketch]]) -> list[str]:
    """The parameters of which two replicas are not the same."""
    return sorted(
        name
        for name, (first, *others) in replicas.items()
        if any(not difference(first, other) <= 1e-9 * (1.0 + math.sqrt(first[0])) for other in others)
    )


def _tensor_parallel_groups(run: Run) -> list[list[int]]:
    """Ranks that stand at the same place of parallel data meshes, if parameters are sharded over more than those."""
    meshes: dict[int, list[int]] = {}
    for trace in run.traces:
        given = [r["mesh"]["ranks"] for r in trace.of("wrap") if r["mesh"] is not None]
        if not given:
            return []
        meshes[trace.rank] = max(given, key=len)
    if any(rank not in ranks for rank, ranks in meshes.items()) or len(run.data_ranks) == run.world_size:
        return []
    if not any(_beyond(entry, meshes) for entries in run.parameters.values() for entry in entries):
        return []
    places: dict[int, list[int]] = {}
    for rank, ranks in meshes.items():
        places.setdefault(ranks.index(rank), []).append(rank)
    return [group for group in places.values() if len(group) > 1]


def _beyond(entry: Record, meshes: dict[int, list[int]]) -> bool:
    """Whether a parameter is cut over ranks outside of this rank's data mesh."""
    own = set(meshes.get(entry["rank"], ()))
    return bool(own) and own < set(entry["ranks"]) and sum("S" in p for p in entry["placements"]) > 1


def _permuted(saved: Sketch, found: Sketch) -> bool:
    """Whether two tensors have the same sum of squares and are far apart."""
    size = math.sqrt(saved[0])
    same_values = abs(saved[0] - found[0]) <= 1e-9 * saved[0]
    return size > 0.0 and same_values and difference(saved, found) > 1e-3 * size


RULES = (
    HsdpReplicasDivergeAtInit,
    MeshArgumentWrong,
    HsdpAllReduceLeftOff,
    SamplerRankIgnoresMesh,
    TpFsdpPermutedWeights,
)
