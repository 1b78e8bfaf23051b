"""A trial launch: whether ranks can run in this environment, on which backend, and whether gloo
averages.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import MachineRefuses
from ..isolation.worlds import wish
from .client import Launcher
from .request import Request

SCRIPT = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == dist.get_world_size()
"""
ON_SHARED_GPU = """\
import torch
import torch.distributed as dist

torch.cuda.set_device(0)
dist.init_process_group("nccl")
world = dist.get_world_size()
mine = torch.ones(1, device="cuda")
all_of_them = torch.empty(world, device="cuda")
dist.all_gather_into_tensor(all_of_them, mine)
dist.reduce_scatter_tensor(mine, all_of_them)
assert mine.item() == world
"""
AVERAGE = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
mine = torch.full((2,), dist.get_rank() + 1.0)
out = torch.zeros(1)
dist.reduce_scatter_tensor(out, mine, op=dist.ReduceOp.AVG)
print(out.item(), flush=True)
"""


def two_ranks_meet(python: str, how: str = "fork") -> tuple[dict[str, Any], float]:
    """(versions, seconds of the launch).

    Raises MachineRefuses if the ranks could not form a process group. `how`: the launcher.
    """
    with tempfile.TemporaryDirectory(prefix="fsdp2-doctor-") as name:
        folder = Path(name)
        with Launcher(python, folder / "launcher.log", wish=wish(folder, Path.cwd())) as launcher:
            completed, answer = _trial(launcher.run, folder, SCRIPT, launcher=how)
            if not completed:
                output = "".join((folder / f"rank{rank}.err").read_text() for rank in range(2))
                raise MachineRefuses(
                    "two ranks could not form a process group:"
                    f" {output.strip()[-500:] or 'no output'}"
                )
            return launcher.versions, float(answer["seconds"])


def shares_a_gpu(launcher: Launcher, backend: str, folder: Path) -> bool:
    """Whether two ranks on the first GPU can gather and reduce through this backend, as FSDP2
    does.
    """
    return _trial(launcher.run, folder, ON_SHARED_GPU, backend)[0]


def average_of_one_and_two(launcher: Launcher, folder: Path) -> float:
    """The mean of 1 and 2 by gloo; NaN if that could not be run."""
    completed, _ = _trial(launcher.run, folder, AVERAGE)
    return (
        float((folder / "rank0.out").read_text(encoding="utf-8").split()[-1])
        if completed
        else math.nan
    )


def _trial(
    run: Callable[[Request], dict[str, Any]],
    folder: Path,
    text: str,
    backend: str = "",
    launcher: str = "fork",
) -> tuple[bool, dict[str, Any]]:
    """Run the text of a script on two ranks: (whether both completed, the launcher's answer)."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "trial.py"
    script.write_text(text, encoding="utf-8")
    answer = run(
        Request(
            str(folder), str(script), str(folder), world_size=2, backend=backend, launcher=launcher
        )
    )
    return not answer["timed_out"] and all(rank["code"] == 0 for rank in answer["ranks"]), answer
