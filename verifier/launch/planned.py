"""A run that is due, as data: the executor makes a request of it (execute.py), when its files and
devices are known.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class PlannedRun:
    """One run to make.

    `{checkpoint}` in the arguments stands for a folder; `files` is what it finds there
    (isolation/worlds.py).
    """

    role: str
    world_size: int
    script: Path
    cwd: Path
    module: str
    project: Path
    launcher: str
    timeout: float
    grace: float
    arguments: tuple[str, ...] = ()
    given: str = ""  # which options its own arguments come from, beside those of the train run
    steps: int = 1
    mode: str = "fsdp"
    files: str = "scratch"
    keeps: bool = False  # what it leaves is what later runs resume from
    leaves: bool = False  # the next run finds what it leaves
    damage: str = ""  # done to the checkpoints at `damaged` before it starts
    damaged: tuple[str, ...] = ()
    optional: bool = False  # it counts only if it completes
    # options that nobody gave, for the batch of all ranks: it counts only if it takes that
    derived: tuple[str, ...] = ()
    note: str = ""
    expected: str = ""  # why it need not complete
    opens: tuple[str, ...] = ()  # checkpoints to open in the place of the script
    # further fields of the Request, for the probe
    probe: dict[str, Any] = field(default_factory=dict)
    cuda_on_cpu: bool = False  # whether ranks have a CUDA that computes on the CPU
    starting_point: bool = True  # whether it leaves or loads the common initial weights
    weights: str = "starting_point"  # the folder of these
