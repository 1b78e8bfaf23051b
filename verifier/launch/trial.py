"""A trial launch: whether ranks can run in this environment, and on which backend."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from ..errors import MachineRefuses
from .client import Launcher
from .request import trial

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


def two_ranks_meet(python: str) -> tuple[dict[str, Any], float]:
    """(versions, seconds of the launch). Raises MachineRefuses if the ranks could not form a process group."""
    with tempfile.TemporaryDirectory(prefix="fsdp2-doctor-") as name:
        folder = Path(name)
        with Launcher(python, folder / "launcher.log") as launcher:
            completed, answer = trial(launcher.run, folder, SCRIPT)
            if not completed:
                output = "".join((folder / f"rank{rank}.err").read_text() for rank in range(2))
                raise MachineRefuses(
                    f"two ranks could not form a process group: {output.strip()[-500:] or 'no output'}"
                )
            return launcher.versions, float(answer["seconds"])


def shares_a_gpu(launcher: Launcher, backend: str, folder: Path) -> bool:
    """Whether two ranks on the first GPU can gather and reduce through this backend, as FSDP2 does."""
    return trial(launcher.run, folder, ON_SHARED_GPU, backend)[0]
