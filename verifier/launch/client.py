"""The verifier's side of the launcher process: start it, send it runs, end it, whatever happens."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import MachineRefuses, UserError
from . import processes
from .request import Request

_START_SECONDS = 120.0
_SLACK_SECONDS = 30.0


class Launcher:
    """A context manager around one launcher process; `versions` tells what torch it has.

    `device` is "auto" (GPUs if there is one for each of `ranks`, else the CPU), "cpu" or "cuda".
    """

    def __init__(
        self, python: str = sys.executable, log: Path | None = None, device: str = "auto", ranks: int = 2
    ) -> None:
        folder = str(Path(__file__).resolve().parents[1])
        command = [python, "-u", folder, device, str(ranks)]
        self._wanted = ranks if device == "cuda" else 0
        self._log = log.open("wb") if log is not None else subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, start_new_session=True
        )
        self.versions: dict[str, Any] = {}

    def __enter__(self) -> Launcher:
        try:
            self.versions = self._read(_START_SECONDS)
            if self.versions.get("fault"):
                raise UserError(f"this Python cannot import torch: {self.versions['message']}")
            if self.versions["devices"] < self._wanted:
                devices = f"{self.versions['devices']} of the {self._wanted} CUDA devices that --device cuda needs here"
                raise MachineRefuses(f"there are {devices}, one for each rank of the largest run")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def run(self, request: Request) -> dict[str, Any]:
        """Run the ranks of one request to their end. Raises MachineRefuses where no socket or process can be had."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request.as_dict()).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError("the launcher process has died") from None
        answer = self._read(request.timeout + request.grace + _SLACK_SECONDS)
        if answer.get("fault") == "no sockets":
            raise MachineRefuses(f"this environment refuses sockets, so ranks cannot meet: {answer['message']}")
        return answer

    def _read(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            raise RuntimeError(f"the launcher process did not answer within {seconds:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the launcher process ended without an answer")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end(self) -> None:
        tree = processes.descendants(self._process.pid)
        if self._process.stdin is not None:
            self._process.stdin.close()
        processes.end_all([*reversed(tree), self._process.pid], grace=0.0, reap=False)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        if not isinstance(self._log, int):
            self._log.close()
