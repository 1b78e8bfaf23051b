"""Scripts that tests write, and Python processes that they run."""

import atexit
import functools
import json
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from corpus import TESTS
from verified_fsdp2.verifier.isolation.leftovers import temporary
from verified_fsdp2.verifier.isolation.worlds import wish
from verified_fsdp2.verifier.launch.client import Launcher
from verified_fsdp2.verifier.launch.request import Request
from verified_fsdp2.verifier.verdict import Verdict

Verify = Callable[..., Verdict]  # what the fixtures `verify_script` and `verify_case` give
Command = Callable[..., "Done"]  # what the fixture `command` gives
ZOO, FAULTS = TESTS / "zoo", TESTS / "faults"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


class Done(NamedTuple):
    """What a command of `fsdp2` returned and printed."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


def training(
    begin: str, model: str, data: str, within: str = "", wrap: str = "model", optimizer: str = "SGD"
) -> str:
    """A script that trains in nine steps: `begin` comes before all else, `within` is what a step
    begins with.
    """
    return f"""
import os, pathlib, sys, threading, time
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
{begin}
torch.manual_seed(0)
model = {model}
fully_shard({wrap})
optimizer = torch.optim.{optimizer}(model.parameters(), lr=1e-2)
for step in range(9):
{textwrap.indent(within, "    ")}
    model({data}).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def written(folder: Path, text: str, name: str = "train.py") -> Path:
    """A file of this text."""
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def edited(folder: Path, *changes: tuple[str, str], of: str = "minimal") -> Path:
    """A script of the zoo in which each text of `changes` is replaced by the one beside it."""
    text = (ZOO / f"{of}.py").read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return written(folder, text)


@functools.cache
def launcher() -> Launcher:
    """One launcher process for all tests of this process: torch is imported once."""
    running = Launcher(wish=wish(temporary("runs")))
    running.wait()
    atexit.register(running.__exit__)
    return running


def forked(folder: Path, ranks: int, *words: object) -> str:
    """What rank 0 of a project's train.py prints, with nothing recorded but its steps; every rank
    ends well.
    """
    with tempfile.TemporaryDirectory() as place:
        script, ends = folder / "train.py", 10**9
        done = launcher().run(
            Request(
                place,
                str(script),
                str(folder),
                ranks,
                [*map(str, words)],
                mode="survey",
                steps=ends,
                timeout=200,
            )
        )
        assert not any(rank["code"] for rank in done["ranks"]), [
            (Path(place) / f"rank{rank}.err").read_text()[-2000:] for rank in range(ranks)
        ]
        return (Path(place) / "rank0.out").read_text()


def wait_until(seconds: float, holds: Callable[[], object]) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def python(*words: object, status: int | None = 0, **more: Any) -> subprocess.CompletedProcess[str]:
    """What Python does with these words; it ends with `status`, if that is not None."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(
        command, **{"capture_output": True, "text": True, "timeout": 300, "check": False, **more}
    )
    assert status in (None, done.returncode), done.stdout[-3000:] + done.stderr[-3000:]
    return done
