"""A rehearsal: one process runs a script as rank 0 of many, on tensors without memory."""

from __future__ import annotations

import os
from pathlib import Path

from ..config.settings import applied
from ..config.target import Target
from ..trace import Run, read_run
from .client import Launcher
from .request import Request

STEPS = 3  # the first one, which makes the optimizer's state, and two more
PER_NODE = 8


def rehearse(target: Target, work: Path, python: str, per_node: int = PER_NODE) -> Run:
    """The run of `target` as rank 0 of `target.nproc`, stopped after `target.steps`. What it writes for itself lies below `work`."""
    folder, outputs, secret = work / "run", work / "checkpoint", os.urandom(16).hex()
    for path in (folder, outputs):
        path.mkdir(parents=True)
    argv, copies = applied((*target.args, *target.save_args), target.cwd, str(outputs), folder)
    for path, text in copies.items():
        path.write_text(text, encoding="utf-8")
    request = Request(
        folder=str(folder),
        script=str(target.script),
        cwd=str(target.cwd),
        module=target.module,
        project=str(target.project),
        argv=argv,
        world_size=target.nproc,
        per_node=per_node,
        mode="rehearse",
        cuda_on_cpu=True,
        steps=target.steps or STEPS,
        timeout=target.timeout,
        secret=secret,
    )
    with Launcher(python, work / "launcher.log", "cpu") as launcher:
        answer = launcher.run(request)
    return read_run(folder, "rehearse", answer, target.nproc, "", target.timeout, secret)
