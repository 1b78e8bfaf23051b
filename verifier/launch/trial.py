"""A first launch, to see whether ranks can run at all on this machine."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from ..errors import MachineRefuses
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


def two_ranks_meet(python: str) -> tuple[dict[str, Any], float]:
    """(versions, seconds of the launch). Raises MachineRefuses if the ranks could not meet."""
    with tempfile.TemporaryDirectory(prefix="fsdp2-doctor-") as name:
        folder = Path(name)
        script = folder / "trial.py"
        script.write_text(SCRIPT, encoding="utf-8")
        with Launcher(python, folder / "launcher.log") as launcher:
            answer = launcher.run(Request(str(folder), str(script), str(folder), world_size=2))
            if any(rank["code"] != 0 for rank in answer["ranks"]) or answer["timed_out"]:
                output = "".join((folder / f"rank{rank}.err").read_text() for rank in range(2))
                raise MachineRefuses(f"two ranks could not meet: {output.strip()[-500:] or 'no output'}")
            return launcher.versions, float(answer["seconds"])
