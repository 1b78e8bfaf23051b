"""What rules on saves share: to which saves a rule applies, and whether a checkpoint contains what
a save was given.
"""

from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

from ...analysis.applicability import absent, unfinished
from ...analysis.checkpoints import unseen_save
from ...analysis.reopened_checkpoints import differing, opened
from ...analysis.saves import Save, all_saves, given, kept
from ..base import Evidence, Finding, Rule, Run, count, some
from ..policies import JudgesExports


class KindRule(Rule):
    """A rule on saves of one kind."""

    wants = "run"
    policies = (JudgesExports(),)
    kind: ClassVar[str]  # what such a save is called

    def about(self, save: Save) -> bool:
        """Whether a save is of that kind."""
        return has_tensors(save)

    def applies(self, evidence: Evidence) -> str:
        if (reason := super().applies(evidence)) or unseen_save(evidence):
            return reason
        saves = all_saves(evidence.trained)
        kind = self.kind if saves else "save"
        return absent(evidence.trained, any(map(self.about, saves)), f"the script makes no {kind}")


class SaveRule(KindRule):
    """A rule on what the saves of the train run were given."""

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        saves = [save for save in all_saves(run) if self.about(save)]
        return (
            self.check(run, saves)
            if saves
            else self.unknown(unfinished(run) or f"no {self.kind} was recorded")
        )

    @abstractmethod
    def check(self, run: Run, saves: list[Save]) -> Finding:
        """The finding on the saves of that kind, at least one."""


class ContentRule(KindRule):
    """The last save to every path that still exists, compared with the contents of its files."""

    needs = frozenset({"train", "inspect"})

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        last = {
            path: saves
            for path, saves in kept(run).items()
            if any(map(self.about, saves)) and given(saves)
        }
        if not last and (reason := unfinished(run)):
            return self.unknown(reason)
        found = {record.path: record for record in opened(evidence)}
        tensors, folders, unreadable = 0, 0, ""
        for path, saves in last.items():
            record = found.get(path)
            # A checkpoint that the script has removed since cannot be read back, and need not be
            # (scripts that keep the last n checkpoints (zoo/checkpoint_latest_pointer.py)).
            if record is None or record.format == "missing":
                continue  # removed by the script since, or nothing was read
            if record.error:
                unreadable = f"{path} could not be read: {record.error}"
                continue
            values = given(saves)
            if wrong := differing(record, values):
                lost = sum(key not in record.entries for key in wrong)
                how = (
                    f"{lost} of them are missing"
                    if lost
                    else "their values differ from those at the call"
                )
                inside = f"{len(wrong)} of {count(len(values), 'tensor')} in {Path(path).name}"
                what = f"{some(wrong)}: {inside} are not what the save"
                return self.failed(
                    f"{what} after step {saves[0].after} was given; {how}", saves[0].line
                )
            tensors, folders = tensors + len(values), folders + 1
        if unreadable or not folders:
            lacks = "no checkpoint existed after the run, so none was read back"
            return self.unknown(unreadable or evidence.missing.get("inspect", lacks))
        return self.passed(
            f"{count(tensors, 'tensor')} in {count(folders, 'checkpoint')} read back as they were"
            " given"
        )


def has_tensors(save: Save) -> bool:
    """Whether a save is given a tensor."""
    return any(entry.kind in ("tensor", "dtensor") for entry in save.entries.values())


def parameter_of(run: Run, key: str) -> str | None:
    """The model's parameter whose name a key is, or ends with."""
    parts = key.split(".")
    return next(
        # Saves nest state dicts under keys of their own (`model.`, `app.state.`): a key is a
        # parameter's if it ends with the parameter's name.
        (name for n in range(len(parts)) if (name := ".".join(parts[n:])) in run.parameters),
        None,
    )
