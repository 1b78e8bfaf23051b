"""Where a rank can be killed in the middle of a save, derived from the saves of the train run."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..trace import Run, Trace
from ..trace.events import Checkpoint, Removed, Renamed, Saving
from .saves import Save, events, saves_of

# Moments inside a save at which a real crash leaves files that a careless reader takes for a whole
# checkpoint (corpus faults incomplete_checkpoint_chosen).
_MOMENTS = {
    "before-data": "before it wrote its data file",
    "before-metadata": "after all data was written, before .metadata",
    "half-file": "after half of the file was written",
}


@dataclass(frozen=True)
class Moment:
    """Where a rank is killed: in its `call`-th save, or before the `call`-th change that it makes
    beside them (probe/crash.py).

    `what`: the text of a report; `steps`: how many the run needs to reach it.
    """

    rank: int
    call: int
    moment: str
    steps: int
    what: str = ""

    @property
    def request(self) -> dict[str, Any]:
        """The options of the probe."""
        return {"rank": self.rank, "call": self.call, "moment": self.moment}

    @property
    def beside(self) -> bool:
        """Whether the rank is killed outside of the functions that save, in what the script does
        around them.
        """
        return self.moment not in _MOMENTS

    @property
    def note(self) -> str:
        """The text of a report."""
        return (
            f"rank {self.rank} killed"
            f" {self.what or f'in its save number {self.call}, {_MOMENTS[self.moment]}'}"
        )


def moments(train: Run, thorough: bool, home: str = "") -> list[Moment]:
    """Where to kill, strongest first: in the second save, where a complete one exists that it may
    overwrite; then around it.

    `home`: the folder of `{checkpoint}`; a file that lies there, and not in a folder of its own, is
    a pointer to a checkpoint or a log.
    """
    steps = events(train)
    if not steps:
        return []
    first = steps[0]
    second = steps[1] if len(steps) > 1 else 2 * first
    saves = {
        trace.rank: [save for save in saves_of(trace) if save.after == first]
        for trace in train.traces
    }
    found: list[Moment] = []

    def kill(rank: int, call: int, moment: str) -> None:
        if second > first:
            # The second save is killed first: only then is there a complete earlier checkpoint that
            # it may overwrite.
            found.append(Moment(rank, len(saves[rank]) + call, moment, second + 1))
        found.append(Moment(rank, call, moment, first + 1))

    for rank, moment in ((train.world_size - 1, "before-data"), (0, "before-metadata")):
        if together := [call for call, save in enumerate(saves[rank], 1) if save.together]:
            kill(rank, together[-1], moment)
    if not found:
        # Where no save is common to all ranks, half a file is left by the last rank that writes
        # one.
        last = max(rank for rank, own in saves.items() if own)
        kill(last, len(saves[last]), "half-file")
    found.sort(key=lambda moment: moment.call, reverse=True)
    around = [*_around(train, second, home)]
    return (
        [*found, *around]
        if thorough
        else [*(m for m in found if m.rank == found[0].rank), *around[:1]]
    )


def _around(train: Run, step: int, home: str) -> Iterator[Moment]:
    """Between a removal and a rename, and before the last file that a rank writes beside DCP's, in
    the save after `step`.
    """
    for trace in train.traces:
        if (call := _exchange(trace, step)) is not None:
            what = (
                "after it removed an earlier checkpoint, before the new one was renamed to its"
                " place"
            )
            yield Moment(trace.rank, call, "before-rename", step + 1, what)
            break
    for trace in reversed(train.traces):
        if (file := _own_file(trace, step, home)) is not None:
            yield Moment(
                trace.rank,
                file[0],
                "before-file",
                step + 1,
                f"before it wrote {file[1]}, after the save of DCP",
            )
            break


def _exchange(trace: Trace, step: int) -> int | None:
    """Which rename of a rank puts a save into the place of one that it has removed or renamed
    before.
    """
    gone: set[str] = set()
    renames, after = 0, 0
    for record in trace.records:
        if isinstance(record, Saving):
            after = record.after_step
        elif isinstance(record, Removed):
            gone.add(record.path)
        elif isinstance(record, Renamed):
            renames += 1
            # A rename into the place of what was removed before: dion loses its checkpoint if it is
            # killed in between (dion: loss of its checkpoint (field)).
            if after >= step and record.new in gone:
                return renames
            gone.add(record.old)
    return None


def _own_file(trace: Trace, step: int, home: str) -> tuple[int, str] | None:
    """(which of a rank's files it is, its name): the last one that it writes into the folder of a
    save by DCP, after that.
    """
    together = [save for save in saves_of(trace) if save.together and save.after == step]
    written = [record for record in trace.of(Checkpoint) if record.op in ("write", "torch.save")]
    files = [
        (number, Path(record.to).name)
        for number, record in enumerate(written, 1)
        if together
        and record.after_step == step
        # A file written after DCP's: lingua's ranks resume from different steps if one is killed
        # before it (lingua: ranks that resume from different steps (field)).
        and record.at > together[-1].record.at
        and _beside(record.to, together, home)
    ]
    return files[-1] if files else None


def _beside(path: str, saves: list[Save], home: str) -> bool:
    """Whether a file lies in the folder of a save, or in the folder above it that is not the one of
    all checkpoints.
    """
    folders = {
        folder for save in saves for folder in (save.to, str(Path(save.to).parent)) if save.to
    }
    # A file directly in the folder of all checkpoints is a pointer or a log, not a part of one
    # save.
    return any(path.startswith(folder + os.sep) for folder in folders - {home})
