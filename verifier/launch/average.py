"""Whether this torch's gloo averages when it is asked to: a first launch of two ranks, on versions not known to be right.

| torch | `reduce_scatter_tensor(op=AVG)` of 1 and 2 on gloo |
|---|---|
| 2.7.1 | 3.0: the sum |
| 2.13.0 | 1.5: right |
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the rules read the constants here, and lint must not import processes
    from .client import Launcher
from .request import Request

RIGHT = ("2.13.0",)
MEAN = 1.5

SCRIPT = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
mine = torch.full((2,), dist.get_rank() + 1.0)
out = torch.zeros(1)
dist.reduce_scatter_tensor(out, mine, op=dist.ReduceOp.AVG)
print(out.item(), flush=True)
"""


def average_of_one_and_two(launcher: Launcher, work: Path, versions: tuple[str, ...] = RIGHT) -> float | None:
    """What gloo gives for the mean of 1 and 2; None where that needs no launch: on
    `versions`, and where ranks use NCCL. Not a number if it could not be run."""
    torch = str(launcher.versions.get("torch", "")).partition("+")[0]
    if torch in versions or launcher.versions.get("devices"):
        return None
    folder = work / "average"
    folder.mkdir(parents=True)
    script = folder / "average.py"
    script.write_text(SCRIPT, encoding="utf-8")
    answer = launcher.run(Request(str(folder), str(script), str(folder), world_size=2))
    if answer["timed_out"] or any(rank["code"] != 0 for rank in answer["ranks"]):
        return math.nan
    return float((folder / "rank0.out").read_text(encoding="utf-8").split()[-1])
