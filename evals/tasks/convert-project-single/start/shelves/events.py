"""What a training yields."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Began:
    step: int
    parameters: int


@dataclass(frozen=True)
class Stepped:
    """Numbers of the batch before the step; `norm` is that before clipping, `ratio` LAMB's mean over the matrices."""

    step: int
    loss: float
    norm: float
    lr: float
    ratio: float


@dataclass(frozen=True)
class Validated:
    step: int
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Due:
    """It is time for a checkpoint."""

    step: int


@dataclass(frozen=True)
class Ended:
    step: int


Event = Began | Stepped | Validated | Due | Ended
