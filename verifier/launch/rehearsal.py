"""A rehearsal: one process runs a script as rank 0 of many, on tensors without memory."""

from __future__ import annotations

import os
from pathlib import Path

from ..config.settings import applied
from ..trace import Run, read_run
from .client import Launcher
from .planned import PlannedRun
from .request import Request

STEPS = 3  # the first one, which makes the optimizer's state, and two more
PER_NODE = 8


def rehearse(planned: PlannedRun, work: Path, python: str, per_node: int = PER_NODE) -> Run:
    """Make the run, as rank 0 of its world size. What the script writes to `{checkpoint}` lies below `work`."""
    folder, outputs, secret = work / "run", work / "checkpoint", os.urandom(16).hex()
    for path in (folder, outputs):
        path.mkdir(parents=True)
    argv, copies = applied(planned.arguments, planned.cwd, str(outputs), folder)
    for path, text in copies.items():
        path.write_text(text, encoding="utf-8")
    request = Request(
        folder=str(folder),
        script=str(planned.script),
        cwd=str(planned.cwd),
        module=planned.module,
        project=str(planned.project),
        argv=argv,
        world_size=planned.world_size,
        per_node=per_node,
        mode="rehearse",
        cuda_on_cpu=True,
        steps=planned.steps,
        timeout=planned.timeout,
        secret=secret,
    )
    with Launcher(python, work / "launcher.log", "cpu") as launcher:
        answer = launcher.run(request)
    return read_run(folder, planned.role, answer, planned.world_size, "", planned.timeout, secret)
