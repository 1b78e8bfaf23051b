"""A first launch, to see whether ranks can run at all on this machine."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from ..errors import MachineRefuses
from .client import Launcher

SCRIPT = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == dist.get_world_size()
"""


def two_ranks_meet(python: str) -> tuple[dict[str, Any], float]:
    """(versions, seconds of the launch). Raises MachineRefuses if the ranks could not meet."""
    with tempfile.TemporaryDirectory(prefix="fsdp2-doctor-") as name:
        folder = Path(name)
        script = folder / "trial.py"
        script.write_text(SCRIPT, encoding="utf-8")
        with Launcher(python, folder / "launcher.log") as launcher:
            answer = launcher.run(request(folder, script))
            if any(rank["code"] != 0 for rank in answer["ranks"]) or answer["timed_out"]:
                output = "".join((folder / f"rank{rank}.err").read_text() for rank in range(2))
                raise MachineRefuses(f"two ranks could not meet: {output.strip()[-500:] or 'no output'}")
            return launcher.versions, float(answer["seconds"])


def request(folder: Path, script: Path) -> dict[str, Any]:
    """The plainest request: two ranks, nothing compared."""
    return {
        "folder": str(folder),
        "script": str(script),
        "argv": [],
        "cwd": str(folder),
        "world_size": 2,
        "timeout": 60.0,
        "grace": 5.0,
        "mode": "fsdp",
        "steps": 1,
        "stress": False,
        "exact": False,
        "starting_point": "",
        "leave_starting_point": False,
        "nudge": False,
        "by_hand": False,
    }
