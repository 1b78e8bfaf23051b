"""Rules on what a script gives to its saves, where it goes, and what is in the files afterwards. None of them needs a resume."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..evidence import LOADS, Evidence
from ..finding import Finding
from ..saves import Save, all_saves, final_path, given, saves_of
from ..trace import Record, Run, difference
from .base import Rule, count, some

NOTHING = "the script saved nothing"


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


class AsyncSaveStateRace(Rule):
    """A save in the background holds what the ranks held when it was called.

    Why: training goes on while the background writes. Tensors that were not copied first (a stager that hands them on, a
    thread around `dcp.save` or `torch.save`) are written half before and half after the next step.
    Wrong:
        state = optimizer.state_dict()
        threading.Thread(target=lambda: torch.save(state, path)).start()  # the next step changes what is being written
    Right:
        state = copy.deepcopy(optimizer.state_dict())
        threading.Thread(target=lambda: torch.save(state, path)).start()
    Mend: Save with `dcp.async_save` and its default stager, or copy every tensor before the thread starts.
    Source: pytorch#144657; pytorch/torchtitan#930; Lightning-AI/pytorch-lightning#20953; meta-pytorch/torchrec PR#4322.
    Torch: run on 2.13.0.
    """

    name = "async-save-state-race"
    family = "checkpoint"
    needs = frozenset({"train", "opened"})

    def judge(self, evidence: Evidence) -> Finding:
        return _compare(self, evidence, in_background, "no save in the background")


class CheckpointHoldsWhatRanksHeld(Rule):
    """Every tensor of a checkpoint, opened by another process, is what the ranks gave to the save.

    Why: a save that raises nothing may still be wrong on the disk: a second save into the same folder replaces the first,
    ranks write over each other's file, a storage layer drops or casts.
    Wrong:
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=path)
        dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=path)  # replaces the model
    Right:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    Mend: Save everything in one call, or each part into a folder of its own.
    Source: read back: every tensor of every save, compared with what the ranks held at the time of the call.
    Torch: run on 2.13.0.
    """

    name = "checkpoint-holds-what-ranks-held"
    family = "checkpoint"
    needs = frozenset({"train", "opened"})
    names_a_cause = False

    def judge(self, evidence: Evidence) -> Finding:
        return _compare(self, evidence, lambda save: not in_background(save), "no save in the main thread")


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


def opened(evidence: Evidence) -> list[Record]:
    """What the opening process found, one record for each path."""
    return evidence.opened.traces[0].of("opened") if evidence.opened is not None and evidence.opened.traces else []


def in_background(save: Save) -> bool:
    """Whether training may go on while this save writes."""
    return save.op == "async_save" or not save.main


def parameter_of(run: Run, key: str) -> str | None:
    """The model's parameter whose name a key is, or ends with."""
    parts = key.split(".")
    return next((name for n in range(len(parts)) if (name := ".".join(parts[n:])) in run.parameters), None)


def _compare(rule: Rule, evidence: Evidence, wanted: Callable[[Save], bool], nothing: str) -> Finding:
    """The last save to every path that is still there, against what is in its files."""
    run = evidence.train
    if run is None:
        return rule.unknown("the script was not run")
    if not run.completed and not all_saves(run):
        return rule.unknown("the train run did not complete")
    last: dict[str, list[Save]] = {}
    for save in sorted((s for s in all_saves(run) if s.to), key=lambda s: s.after):
        path = final_path(run, save)
        kept = last.setdefault(path, [])
        last[path] = [*(s for s in kept if s.after == save.after), save]
    last = {path: saves for path, saves in last.items() if any(map(wanted, saves))}
    if not last:
        return rule.passed(nothing if all_saves(run) else NOTHING)
    found = {record["path"]: record for record in opened(evidence)}
    tensors, folders, closed = 0, 0, None
    for path, saves in last.items():
        record = found.get(path)
        if record is None or record["format"] == "missing":
            continue  # removed by the script since, or nothing was opened
        if record["error"]:
            closed = f"{path} could not be opened: {record['error']}"
            continue
        values = given(saves)
        wrong = [key for key, options in values.items() if not _holds(record["entries"].get(key), options)]
        if wrong:
            lost = [key for key in wrong if key not in record["entries"]]
            told = (
                f"{len(lost)} of them are not in it at all"
                if lost
                else "with other values than at the time of the call"
            )
            return rule.failed(
                f"{count(len(wrong), 'tensor')} of {len(values)} ({some(wrong)}) in {path} are not what was given to the save "
                f"after step {saves[0].after}: {told}",
                saves[0].line,
            )
        tensors, folders = tensors + len(values), folders + 1
    if closed is not None:
        return rule.unknown(closed)
    if not folders:
        return rule.unknown("nothing that was saved was there to be opened after the run")
    return rule.passed(f"{count(tensors, 'tensor')} in {count(folders, 'checkpoint')}, opened and as they were given")


def _holds(entry: Record | None, options: list[list[float]]) -> bool:
    if entry is None or entry.get("sketch") is None:
        return False
    value: list[Any] = entry["sketch"]
    loose = 2.0**-6 if entry["dtype"] in ("bfloat16", "float16") else 1e-9
    return any(
        difference(value, other) <= loose * math.sqrt(max(other[0], 0.0)) + 1e-30 or value == other for other in options
    )
