"""Whether a checkpoint holds what was given to the save."""

from __future__ import annotations

from collections.abc import Callable

from ...analysis.checkpoints import unseen_save
from ...analysis.inspected import differing, opened
from ...analysis.presence import absent, unfinished
from ...analysis.saves import Save, all_saves, given, kept
from ...analysis.wording import count, some
from ...evidence import Evidence
from ...finding import Finding
from ...trace import Run
from ..base import Rule

NOTHING = "the script saves nothing"

Wanted = Callable[[Save], bool]


def nothing_saved(evidence: Evidence, wanted: Wanted, reason: str) -> str:
    """Why a rule on saves of a kind does not apply: the train run came to its end and made none; "" otherwise."""
    run = evidence.trained
    saves = all_saves(run)
    if not saves:
        return "" if unseen_save(evidence) else absent(run, False, NOTHING)
    return absent(run, any(map(wanted, saves)), reason)


def has_tensors(save: Save) -> bool:
    """Whether a tensor is given to a save."""
    return any(entry.kind in ("tensor", "dtensor") for entry in save.entries.values())


def to_compare(run: Run, wanted: Wanted) -> dict[str, list[Save]]:
    """{path: the saves that wrote what is there at the end} where one is of a kind and has tensors."""
    return {path: saves for path, saves in kept(run).items() if any(map(wanted, saves)) and given(saves)}


def compare(rule: Rule, evidence: Evidence, wanted: Wanted) -> Finding:
    """The last save to every path that is still there, against what is in its files."""
    run = evidence.trained
    last = to_compare(run, wanted)
    if not last and (reason := unfinished(run)):
        return rule.unknown(reason)
    found = {record.path: record for record in opened(evidence)}
    tensors, folders, closed = 0, 0, None
    for path, saves in last.items():
        record = found.get(path)
        if record is None or record.format == "missing":
            continue  # removed by the script since, or nothing was opened
        if record.error:
            closed = f"{path} could not be opened: {record.error}"
            continue
        values = given(saves)
        if wrong := differing(record, values):
            lost = [key for key in wrong if key not in record.entries]
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
