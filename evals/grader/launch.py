"""Starts a script on N ranks as torchrun would, by fork from a process that has torch already;
nothing outlives the call.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

# not used here: every optimizer imports it, and a second in each rank is saved
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor

from . import rank as in_rank

LAUNCHER = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
)
PR_SET_PDEATHSIG = 1
AFTER_A_FAILURE = 3.0  # seconds that the other ranks have to say what they saw


@dataclass(frozen=True)
class Launch:
    """One launch; `ranks` 0 means plain `python script`, without torchrun's environment."""

    script: Path
    argv: tuple[str, ...]
    ranks: int
    folder: Path
    disturb: in_rank.Disturb = field(default_factory=in_rank.Disturb)

    def run(self, until: float) -> str:
        """Run it to its end or to the time `until`; the empty string if every rank ended with code
        0, else what happened.
        """
        torch.set_num_threads(1)  # no thread pool may exist when a process is forked
        self.folder.mkdir(parents=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        children: dict[int, int] = {}
        waiting: set[int] = set()
        try:
            for rank in range(max(self.ranks, 1)):
                if (pid := os.fork()) == 0:
                    self.be_rank(rank, port)
                children[pid] = rank
                waiting.add(pid)
            return self.wait(children, waiting, until)
        finally:
            for pid in children:
                self.end(pid, pid in waiting)

    def wait(self, children: dict[int, int], waiting: set[int], until: float) -> str:
        """Wait for the ranks, taking those that have ended out of `waiting`."""
        failed = ""
        while waiting:
            for pid in list(waiting):
                done, status = os.waitpid(pid, os.WNOHANG)
                if not done:
                    continue
                waiting.discard(pid)
                if status != 0 and not failed:
                    code = os.waitstatus_to_exitcode(status)
                    failed = (
                        f"rank {children[pid]} ended with {code}: {self.last_words(children[pid])}"
                    )
                    until = min(until, time.monotonic() + AFTER_A_FAILURE)
            if waiting and time.monotonic() > until:
                silent = sorted(children[pid] for pid in waiting)
                last = self.last_words(silent[0])
                return failed or f"ranks {silent} were still running when the time was up: {last}"
            time.sleep(0.01)
        return failed

    def be_rank(self, rank: int, port: int) -> None:
        """The child; never returns."""
        code = 70
        try:
            os.setsid()
            ctypes.CDLL(None).prctl(
                PR_SET_PDEATHSIG, signal.SIGKILL
            )  # also if the grader itself is killed
            os.chdir(self.script.parent)
            log = os.open(self.folder / f"log.{rank}", os.O_WRONLY | os.O_CREAT)
            empty = os.open(os.devnull, os.O_RDONLY)
            for stream, source in ((0, empty), (1, log), (2, log)):
                os.dup2(source, stream)
            for name in LAUNCHER:
                os.environ.pop(name, None)
            if self.ranks:
                size = str(self.ranks)
                values = (str(rank), str(rank), size, size, "127.0.0.1", str(port), "grade")
                os.environ.update(zip(LAUNCHER, values, strict=True))
            code = in_rank.run(self.script, rank, list(self.argv), self.folder, self.disturb)
        finally:
            os._exit(code)

    def last_words(self, rank: int) -> str:
        """The last line of a rank's output that reports an error, or else the last line."""
        path = self.folder / f"log.{rank}"
        lines = (
            path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            if path.exists()
            else []
        )
        errors = [
            line
            for line in lines
            if re.match(r"\S*(Error|Exception|Failure|Exit)\b", line.rpartition("]: ")[2])
        ]
        return (errors or lines or ["it said nothing"])[-1][:300]

    @staticmethod
    def end(pid: int, alive: bool) -> None:
        """Kill what a rank started, and the rank itself if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if alive:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
