"""Where a rank can be killed in the middle of a save, derived from the saves of the train run."""

from dataclasses import asdict, dataclass
from typing import Any

from ..trace import Run
from .saves import events, saves_of

_MOMENTS = {
    "before-data": "before it wrote its data file",
    "before-metadata": "after all data was written, before .metadata",
    "half-file": "after half of the file was written",
}


@dataclass(frozen=True)
class Moment:
    """Where a rank is killed: in its `call`-th save. `steps`: how many the run needs to reach it."""

    rank: int
    call: int
    moment: str
    steps: int

    @property
    def request(self) -> dict[str, Any]:
        """The options of the probe."""
        return {key: value for key, value in asdict(self).items() if key != "steps"}

    @property
    def note(self) -> str:
        """The text of a report."""
        return f"rank {self.rank} killed in its save number {self.call}, {_MOMENTS[self.moment]}"


def moments(train: Run, thorough: bool) -> list[Moment]:
    """Where to kill, strongest first: in the second save, where a complete one exists that it may overwrite."""
    steps = events(train)
    if not steps:
        return []
    first = steps[0]
    second = steps[1] if len(steps) > 1 else 2 * first
    saves = {trace.rank: [save for save in saves_of(trace) if save.after == first] for trace in train.traces}
    found: list[Moment] = []

    def kill(rank: int, call: int, moment: str) -> None:
        if second > first:
            found.append(Moment(rank, len(saves[rank]) + call, moment, second + 1))
        found.append(Moment(rank, call, moment, first + 1))

    for rank, moment in ((train.world_size - 1, "before-data"), (0, "before-metadata")):
        if together := [call for call, save in enumerate(saves[rank], 1) if save.together]:
            kill(rank, together[-1], moment)
    if not found:
        last = max(rank for rank, own in saves.items() if own)
        kill(last, len(saves[last]), "half-file")
    found.sort(key=lambda moment: moment.call, reverse=True)
    return found if thorough else [m for m in found if m.rank == found[0].rank]
