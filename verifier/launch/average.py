"""Whether `ReduceOp.AVG` averages on this torch's gloo: a launch of two ranks, on versions not known to be right.

| torch | `reduce_scatter_tensor(op=AVG)` of 1 and 2 on gloo |
|---|---|
| 2.7.1, 2.8.0 | 3.0: the sum |
| 2.13.0, 2.14.1 | 1.5: right |

There the probe averages in gloo's place (probe/substitutes/averages.py): it is the machine's fault and not the script's.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the rules read the constants here, and lint must not import processes
    from .client import Launcher
from .request import trial

RIGHT = ("2.13.0", "2.14.1")
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


def average_is_right(launcher: Launcher) -> bool:
    """Whether gloo of this torch is known to average."""
    return str(launcher.versions.get("torch", "")).partition("+")[0] in RIGHT


def average_of_one_and_two(launcher: Launcher, work: Path, versions: tuple[str, ...] = RIGHT) -> float | None:
    """The mean of 1 and 2 by gloo; NaN if that could not be run, None where no launch is needed: on `versions` and with NCCL."""
    torch = str(launcher.versions.get("torch", "")).partition("+")[0]
    if torch in versions or launcher.versions.get("devices"):
        return None
    folder = work / "average"
    completed, _ = trial(launcher.run, folder, SCRIPT)
    return float((folder / "rank0.out").read_text(encoding="utf-8").split()[-1]) if completed else math.nan
