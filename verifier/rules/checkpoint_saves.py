"""Rules on what a script gives to its saves and where it goes. None of them needs a resume."""

from __future__ import annotations

import math

from ..evidence import LOADS, Evidence
from ..finding import Finding
from ..saves import Save, all_saves, saves_of
from ..trace import Record, Run
from .base import Rule, count, some
from .checkpoint_opened import NOTHING, opened


class RankDependentCheckpointPath(Rule):
    """All ranks give one save the same path, and every file that its metadata names is there.

    Why: a path with the rank, a time or a random name in it is another one on every rank: each writes its shards into a
    folder of its own, the metadata lies in one of them, and the loss of the others shows at the resume.
    Wrong:
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{path}/{time.time_ns()}")
    Right:
        names = [f"{path}/{time.time_ns()}"]
        dist.broadcast_object_list(names, src=0)
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=names[0])
    Mend: Make the path on rank 0 and broadcast it; write to storage that all ranks share.
    Source: measured: FileNotFoundError on `__1_0.distcp` at the resume; the save itself does not complain.
    Torch: run on 2.13.0.
    """

    name = "rank-dependent-checkpoint-path"
    family = "checkpoint"
    needs = frozenset({"train", "opened"})

    def judge(self, evidence: Evidence) -> Finding:
        if evidence.train is None:
            return self.unknown("the script was not run")
        ranks = [[s for s in saves_of(trace) if s.together] for trace in evidence.train.traces]
        for saves in zip(*ranks, strict=False):
            if len({save.to for save in saves}) > 1:
                told = "; ".join(f"rank {save.rank} to {save.to}" for save in saves[:3])
                return self.failed(f"one save goes to different places: {told}", saves[0].line)
        for record in opened(evidence):
            if record["missing_files"]:
                lost = record["missing_files"]
                line = next((s.line for s in all_saves(evidence.train)), None)
                return self.failed(f"{record['path']}: {record['error']} ({some(lost)})", line)
        if not any(ranks):
            return self.passed("no save was made by all ranks together")
        return self.passed(f"{count(len(ranks[0]), 'save')}, each to one place from every rank")


class LocalShardExport(Rule):
    """What is saved under a parameter's name is the whole parameter, or all of its shards.

    Why: `torch.save` of a DTensor or of `to_local()` writes one rank's part. From rank 0 alone, or from all ranks into
    one file, the rest of the model is nowhere; the file has the right keys, and shows it only when it is loaded.
    Wrong:
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), path)
    Right:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            torch.save(state, path)
    Mend: Make a full state dict on all ranks and write it on rank 0, or save through DCP; a file of shards needs one for each rank.
    Source: axolotl#1947; huggingface/accelerate#3487; RLinf PR#1569; verl PR#7612; Megatron-LM PR#4888.
    Torch: run on 2.13.0.
    """

    name = "local-shard-export"
    family = "checkpoint"

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        if run is None:
            return self.unknown("the script was not run")
        saves = all_saves(run)
        if not saves:
            return self.passed(NOTHING)
        if run.world_size == 1:
            return self.passed("one rank holds whole tensors")
        for after in sorted({save.after for save in saves}):
            stored = _stored_shards(run, [save for save in saves if save.after == after])
            lost = {name: part for name, part in stored.items() if part[0] < part[1]}
            if lost:
                name, (held, whole, save) = next(iter(lost.items()))
                how = "one rank" if len({s.rank for s in saves if s.to == save.to}) == 1 else "several ranks, one file"
                return self.failed(
                    f"{count(len(lost), 'tensor')} of the save after step {after} ({some(lost)}) "
                    f"{'is a shard' if len(lost) == 1 else 'are shards'}: {held} of the {whole} elements of {name} were written ({how})",
                    save.line,
                )
        return self.passed(f"{count(len(saves), 'call')} of a save function: whole tensors, or all shards of them")


def _stored_shards(run: Run, saves: list[Save]) -> dict[str, tuple[int, int, Save]]:
    """{tensor given as a shard: (elements that the files hold, elements of the whole, a save of it)}."""
    kept: dict[tuple[str, str], tuple[str, tuple[int, ...], int, int, Save]] = {}
    for save in saves:
        if not save.to:
            continue
        for key, entry in save.entries.items():
            if entry["kind"] == "dtensor" and entry["sharded"] and not save.together:
                own, offset = math.prod(entry["own"]), tuple(entry["offset"])
                kept[save.to, key] = (key, offset, own, math.prod(entry["shape"]), save)
            elif entry["kind"] == "tensor" and (found := _shard_of(run, save.rank, key, entry)) is not None:
                kept[save.to, key] = (found[0], (save.rank,), found[1], found[2], save)
    out: dict[str, tuple[int, int, Save]] = {}
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for name, offset, own, whole, save in kept.values():
        if (name, offset) not in seen:
            seen.add((name, offset))
            out[name] = (out.get(name, (0, 0, save))[0] + own, whole, save)
    return out


def _shard_of(run: Run, rank: int, key: str, entry: Record) -> tuple[str, int, int] | None:
    """(parameter, elements here, elements in all) if this plain tensor is a rank's part of a sharded parameter."""
    name = parameter_of(run, key)
    mine = next((e for e in run.parameters.get(name or "", []) if e["rank"] == rank), None)
    if name is None or mine is None or not mine["sharded"] or mine["local_numel"] == mine["numel"]:
        return None
    same = math.prod(entry["shape"]) == mine["local_numel"] and len(entry["shape"]) == len(mine["shape"])
    return (name, mine["local_numel"], mine["numel"]) if same else None


class WrapperPrefixKeys(Rule):
    """The keys of a checkpoint are the parameter names of the model, without the names of wrappers.

    Why: `torch.compile`, activation checkpointing and DDP-like wrappers put `_orig_mod`, `_checkpoint_wrapped_module` or
    `module` into the names. A checkpoint with such keys loads only into a model that is wrapped in the same order.
    Wrong:
        model = torch.compile(model, backend="eager")
        torch.save({name: p.full_tensor() for name, p in model.named_parameters()}, path)
    Right:
        model.compile(backend="eager")
        torch.save({name: p.full_tensor() for name, p in model.named_parameters()}, path)
    Mend: Compile in place (`model.compile()`), take state through `get_model_state_dict`, and strip prefixes at an export.
    Source: pytorch/torchtitan#2622; huggingface/pytorch-image-models PR#2003; mosaicml/composer PR#2745; pytorch#124546.
    Torch: run on 2.13.0.
    """

    name = "wrapper-prefix-keys"
    family = "checkpoint"

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        if run is None:
            return self.unknown("the script was not run")
        saves = all_saves(run)
        for save in saves:
            tensors = [key for key, entry in save.entries.items() if entry["kind"] != "object"]
            for word in ("_orig_mod", "_checkpoint_wrapped_module"):
                wrapped = [key for key in tensors if word in key.split(".")]
                if wrapped:
                    return self.failed(
                        f"{count(len(wrapped), 'key')} of {len(tensors)} hold `{word}` ({some(wrapped)})", save.line
                    )
            names = set(run.parameters)
            wrapped = [key for key in tensors if key.rpartition("module.")[2] in names and _leads(key, "module.")]
            clean = [key for key in tensors if parameter_of(run, key) and key not in wrapped]
            if wrapped and not clean and not any(key.endswith("n_averaged") for key in tensors):
                return self.failed(f"{count(len(wrapped), 'key')} begin with `module.` ({some(wrapped)})", save.line)
        return self.passed("no wrapper's name in any key" if saves else NOTHING)


def _leads(key: str, word: str) -> bool:
    head = key.partition(word)[0]
    return word in key and (not head or head.endswith("."))


class AsyncSaveProcessGroup(Rule):
    """A save in the background has a process group of its own.

    Why: `async_save` issues collectives in a thread. On the group that training uses they meet those of the main thread in an
    order that no two ranks share: a deadlock, sooner or later. On NCCL alone it is refused at once.
    Wrong:
        future = dcp.async_save({"model": get_model_state_dict(model)}, checkpoint_id=path)
        model(batch)  # collectives on the same group while the save is in flight
        future.result()
    Right:
        group = dist.new_group(backend="gloo")  # once, at the start
        future = dcp.async_save({"model": get_model_state_dict(model)}, checkpoint_id=path, process_group=group)
        model(batch)
        future.result()
    Mend: Make a gloo group once, `group = dist.new_group(backend="gloo")`, and give it to every `async_save` as `process_group`.
    Source: KempnerInstitute/KempnerForge#104; ByteDance-Seed/VeOmni PR#1176; InternLM/xtuner PR#1703.
    Torch: run on 2.13.0.
    """

    name = "async-save-process-group"
    family = "checkpoint"

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        if run is None:
            return self.unknown("the script was not run")
        for trace in run.traces:
            for record in trace.of("save_in_flight"):
                if not record["apart"]:
                    place = record["at_line"] or {}
                    return self.failed(
                        f"rank {trace.rank} issues collectives ({record['what']}, line {place.get('line')}) on the group "
                        "on which an asynchronous save is in flight",
                        record["saved_line"],
                    )
        number = sum(save.op == "async_save" for save in all_saves(run)) // max(run.world_size, 1)
        if not number:
            return self.passed("no asynchronous save")
        return self.passed(f"{count(number, 'asynchronous save')}, none on a group that the main thread used meanwhile")


class Step0SaveAdvancesAdam(Rule):
    """Adam's step counter says how many steps were made.

    Why: torch's state-dict helpers create missing optimizer state by a step with zero gradients, and leave its counter at 1.
    A save (or a load template that is not filled) before the first step makes Adam's first update 1.34 times too small.
    Wrong:
        optimizer = torch.optim.AdamW(shard(model).parameters(), lr=1e-3)
        dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=path)  # before any step
    Right:
        optimizer = torch.optim.AdamW(shard(model).parameters(), lr=1e-3)
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=path)
    Mend: Do not take the optimizer's state before its first step, or set `state["step"]` back to 0 afterwards.
    Source: measured: 1.34 times; the same in NVIDIA/Megatron-LM#5974, PR#5976.
    Torch: run on 2.13.0.
    """

    name = "step0-save-advances-adam"
    family = "checkpoint"

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        if run is None or not (first := run.at_step("step", 1)):
            return self.unknown("no optimizer step was seen")
        trace = run.traces[0]
        before = first[0]["seq"]
        if any(r["op"] in LOADS and r["seq"] < before for r in trace.of("checkpoint")):
            return self.passed("the train run itself starts from a checkpoint")
        counters = {n: s["step"] for n, s in first[0]["state"].items() if isinstance(s.get("step"), int | float)}
        ahead = [name for name, value in counters.items() if value >= 1]
        if not ahead:
            return self.passed("no step is counted before the first")
        made = [r for r in trace.of("template") if r["seq"] < before and r["optimizers"] and not r["had_state"]]
        line = made[0]["at_line"] if made else first[0]["at_line"]
        return self.failed(
            f"before the first step the counter of {count(len(ahead), 'parameter')} ({some(ahead)}) is at {counters[ahead[0]]:g}",
            line,
        )


class FullStateDictOom(Rule):
    """A full state dict is made in the memory of the rank that writes it, and of no other.

    Why: `full_state_dict=True` without `cpu_offload=True` gives every rank the whole model, on its device: what FSDP was
    used to avoid. With both, rank 0 alone gets it, in CPU memory.
    Wrong:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if dist.get_rank() == 0:
            torch.save(state, path)
    Right:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            torch.save(state, path)
    Mend: Add `cpu_offload=True`, or save through DCP.
    Source: verl-project/verl#1517, PR#1667; meta-pytorch/torchtune PR#1495; axolotl PR#1828; pytorch#142355.
    Torch: run on 2.13.0: 16 keys on each of 2 ranks; with `cpu_offload`, 16 and 0.
    """

    name = "full-state-dict-oom"
    family = "checkpoint"

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        if run is None:
            return self.unknown("the script was not run")
        writers = {save.rank for save in all_saves(run) if save.op == "torch.save" and save.to}
        steps = {save.after + 1 for save in all_saves(run) if save.op == "torch.save"}
        idle = [
            (trace.rank, record)
            for trace in run.traces
            for record in trace.of("template")
            if record["full"] and not record["offload"] and record["bytes"] and record["step"] in steps
        ]
        waste = [(rank, record) for rank, record in idle if rank not in writers]
        if len(writers) == 1 and waste:
            rank, record = max(waste, key=lambda item: int(item[1]["bytes"]))
            return self.failed(
                f"only rank {min(writers)} writes, but rank {rank} too gets the whole state: {record['bytes']:,} bytes "
                f"on each of {run.world_size} ranks",
                record["at_line"],
            )
        return self.passed("no rank gets a full state dict that it does not write")


def parameter_of(run: Run, key: str) -> str | None:
    """The model's parameter whose name a key is, or ends with."""
    parts = key.split(".")
    return next((name for n in range(len(parts)) if (name := ".".join(parts[n:])) in run.parameters), None)
