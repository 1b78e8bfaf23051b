"""Whether a checkpoint holds what was given to the save."""

from __future__ import annotations

from collections.abc import Callable

from ...analysis.opened import differing, opened
from ...analysis.saves import Save, all_saves, given, kept
from ...analysis.wording import count, some
from ...evidence import Evidence
from ...finding import Finding
from ..base import Rule

NOTHING = "the script saved nothing"


def compare(rule: Rule, evidence: Evidence, wanted: Callable[[Save], bool], nothing: str) -> Finding:
    """The last save to every path that is still there, against what is in its files."""
    run = evidence.train
    if run is None:
        return rule.unknown("the script was not run")
    if not run.completed and not all_saves(run):
        return rule.unknown("the train run did not complete")
    last = {path: saves for path, saves in kept(run).items() if any(map(wanted, saves)) and given(saves)}
    if not last:
        return rule.passed(nothing if all_saves(run) else NOTHING)
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
