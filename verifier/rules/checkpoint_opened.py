"""Rules on what is in the files that a script has saved, opened by a process of its own. They need no resume."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..evidence import Evidence
from ..finding import Finding
from ..saves import Save, all_saves, given, kept
from ..trace import Record, Sketch, difference
from .base import Rule, count, some

NOTHING = "the script saved nothing"


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


def opened(evidence: Evidence) -> list[Record]:
    """What the opening process found, one record for each path."""
    return evidence.opened.traces[0].of("opened") if evidence.opened is not None and evidence.opened.traces else []


def in_background(save: Save) -> bool:
    """Whether training may go on while this save writes."""
    return save.op == "async_save" or not save.main


def _compare(rule: Rule, evidence: Evidence, wanted: Callable[[Save], bool], nothing: str) -> Finding:
    """The last save to every path that is still there, against what is in its files."""
    run = evidence.train
    if run is None:
        return rule.unknown("the script was not run")
    if not run.completed and not all_saves(run):
        return rule.unknown("the train run did not complete")
    last = {path: saves for path, saves in kept(run).items() if any(map(wanted, saves)) and given(saves)}
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
        if wrong := differing(record, values):
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


def differing(record: Record, values: dict[str, list[Sketch]]) -> list[str]:
    """The keys of what was given to a save whose tensors are not in its opened files as they were given."""
    return [key for key, options in values.items() if not _holds(record["entries"].get(key), options)]


def _holds(entry: Record | None, options: list[list[float]]) -> bool:
    if entry is None or entry.get("sketch") is None:
        return False
    value: list[Any] = entry["sketch"]
    if not all(map(math.isfinite, value)):  # a mask with infinities has no sketch to compare
        return any(not all(map(math.isfinite, other)) for other in options)
    loose = 2.0**-6 if entry["dtype"] in ("bfloat16", "float16") else 1e-9
    return any(
        difference(value, other) <= loose * math.sqrt(max(other[0], 0.0)) + 1e-30 or value == other for other in options
    )
