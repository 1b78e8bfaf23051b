from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    name: str
    updates: int
    steps: int  # sampling steps of the student; 0 stands for training on data
    lr: float


SCHEDULE = (
    Phase("data", 10, 0, 4e-3),
    Phase("distil-8", 5, 8, 2e-3),
    Phase("distil-4", 5, 4, 2e-3),
)


def locate(update):
    """Phase of a global update and the position in it."""
    for number, phase in enumerate(SCHEDULE):
        if update < phase.updates:
            return number, phase, update
        update -= phase.updates
    raise IndexError(update)


TOTAL = sum(p.updates for p in SCHEDULE)
