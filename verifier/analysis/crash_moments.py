"""Where a rank can be killed in the middle of a save, worked out from the saves that the train run made."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..trace import Run
from .saves import events, saves_of


@dataclass(frozen=True)
class Moment:
    """Where a rank is killed: in its `call`-th save. `steps`: what the run needs to come there."""

    rank: int
    call: int
    moment: str
    steps: int

    @property
    def request(self) -> dict[str, Any]:
        """As the probe is asked for it."""
        return {key: value for key, value in asdict(self).items() if key != "steps"}

    @property
    def note(self) -> str:
        """In words."""
        where = {
            "before-data": "before it wrote its data file",
            "before-metadata": "when all data was written, before .metadata",
            "half-file": "when half of the file was written",
        }
        return f"rank {self.rank} killed in its save number {self.call}, {where[self.moment]}"


def moments(train: Run, thorough: bool) -> list[Moment]:
    """Where to kill, the strongest first: in the second save, where there is a complete one and perhaps one to overwrite."""
    steps = events(train)
    if not steps:
        return []
    first = steps[0]
    second = steps[1] if len(steps) > 1 else 2 * first
    found = []
    for rank, moment in ((train.world_size - 1, "before-data"), (0, "before-metadata")):
        own = [save for save in saves_of(train.traces[rank]) if save.after == first]
        sharded = [n for n, save in enumerate(own) if save.op != "torch.save" and not save.alone]
        if sharded:
            found += [Moment(rank, len(own) + sharded[-1] + 1, moment, second + 1)] if second > first else []
            found += [Moment(rank, sharded[-1] + 1, moment, first + 1)]
    if not found:
        for trace in reversed(train.traces):
            own = [save for save in saves_of(trace) if save.after == first]
            if own:
                found += [Moment(trace.rank, 2 * len(own), "half-file", second + 1)] if second > first else []
                found += [Moment(trace.rank, len(own), "half-file", first + 1)]
                break
    found.sort(key=lambda moment: moment.call, reverse=True)
    return found if thorough else [m for m in found if m.rank == found[0].rank]
