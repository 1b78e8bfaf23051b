"""What gloo of this torch gives for the mean of 1 and 2: a launch of two ranks, on versions not known to be right."""

from __future__ import annotations

import math
from pathlib import Path

from .client import Launcher
from .request import trial

SCRIPT = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
mine = torch.full((2,), dist.get_rank() + 1.0)
out = torch.zeros(1)
dist.reduce_scatter_tensor(out, mine, op=dist.ReduceOp.AVG)
print(out.item(), flush=True)
"""


def average_of_one_and_two(launcher: Launcher, work: Path) -> float:
    """The mean of 1 and 2 by gloo; NaN if that could not be run."""
    folder = work / "average"
    completed, _ = trial(launcher.run, folder, SCRIPT)
    return float((folder / "rank0.out").read_text(encoding="utf-8").split()[-1]) if completed else math.nan
