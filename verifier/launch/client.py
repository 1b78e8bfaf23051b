"""The verifier's side of the launcher process: start it, send it runs, end it, whatever happens."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import MachineRefuses, UserError, starving
from ..isolation.choose import Choice, Wish
from . import processes
from .request import Request

_START_SECONDS = 120.0
_SLACK_SECONDS = 30.0
_END_SECONDS = 6.0
_OUTSIDE = "was killed from outside: out of memory, or by the script"


class Launcher:
    """A context manager around one launcher process; `versions` describes its torch.

    `device` is "auto" (GPUs if there is one for each of `ranks`, else the CPU), "cpu" or "cuda".
    With `share` there may be fewer. `wish` is how runs are to be isolated; `choice` is how they
    are.
    """

    def __init__(
        self,
        python: str = sys.executable,
        log: Path | None = None,
        device: str = "auto",
        ranks: int = 2,
        share: bool = False,
        wish: Wish | None = None,
    ) -> None:
        folder = str(Path(__file__).resolve().parents[1])
        command = [
            python,
            "-u",
            folder,
            device,
            str(ranks),
            *([wish.as_json()] if wish is not None else []),
        ]
        self._wanted = (1 if share else ranks) if device == "cuda" else 0
        self._log = log.open("wb") if log is not None else subprocess.DEVNULL
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
            bufsize=0,
        )
        self.versions: dict[str, Any] = {}
        self._received = b""
        self._made = 0
        self._limits: dict[int, float] = {}
        self._answers: dict[int, dict[str, Any]] = {}

    def __enter__(self) -> Launcher:
        self.wait()
        return self

    def wait(self) -> None:
        """Until it has imported torch: `versions`.

        Raises UserError, MachineRefuses or RuntimeError if it cannot serve.
        """
        try:
            self.versions = self._read(_START_SECONDS)
            if self.versions.get("fault") == "machine":
                raise MachineRefuses(self.versions["message"])
            if self.versions.get("fault") == "torch":
                raise UserError(f"this Python cannot import torch: {self.versions['message']}")
            if self.versions.get("fault"):
                raise RuntimeError(f"the probe does not fit this torch: {self.versions['message']}")
            if self.versions["devices"] < self._wanted:
                devices = (
                    f"{self.versions['devices']} of the {self._wanted} CUDA devices that --device"
                    " cuda needs here"
                )
                raise MachineRefuses(f"there are {devices}, one for each rank of the largest run")
        except BaseException:
            self._end()
            raise

    def __exit__(self, *error: object) -> None:
        self._end()

    @property
    def choice(self) -> Choice:
        """How runs are isolated."""
        return Choice.of(self.versions.get("isolation", {}))

    def run(self, request: Request) -> dict[str, Any]:
        """Run the ranks of one request to their end.

        Raises MachineRefuses where no socket or process can be had.
        """
        return self.finish(self.start(request))

    def start(self, request: Request) -> int:
        """Begin a run; the number is for `finish`."""
        assert self._process.stdin is not None
        self._made += 1
        try:
            self._process.stdin.write(
                json.dumps({**request.as_dict(), "number": self._made}).encode() + b"\n"
            )
        except BrokenPipeError:
            raise self._gone() from None
        self._limits[self._made] = (
            time.monotonic() + request.timeout + request.grace + _SLACK_SECONDS
        )
        return self._made

    def finish(self, number: int) -> dict[str, Any]:
        """Wait for the end of a run: how each of its ranks ended."""
        limit = self._limits.pop(number)
        self._wait([number], limit)
        answer = self._answers.pop(number)
        if answer.get("fault") == "no sockets":
            raise MachineRefuses(
                f"no sockets, so ranks cannot form a process group: {answer['message']}"
            )
        if answer.get("fault") == "machine":
            raise MachineRefuses(answer["message"])
        if answer.get("fault") == "killed":
            raise MachineRefuses(f"the process that manages a run {_OUTSIDE}")
        if "fault" in answer:
            self._must_not_starve()
            raise RuntimeError(answer["fault"])
        return answer

    def first_to_end(self, numbers: Sequence[int]) -> int:
        """Wait until one of these runs has ended: its number, for `finish`."""
        self._wait(numbers, min(self._limits[number] for number in numbers))
        return next(number for number in numbers if number in self._answers)

    def _wait(self, numbers: Sequence[int], limit: float) -> None:
        """Read answers until there is one of these runs."""
        while not any(number in self._answers for number in numbers):
            answer = self._read(max(limit - time.monotonic(), 0.1))
            self._answers[answer.pop("number")] = answer

    def _read(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        until = time.monotonic() + seconds
        while b"\n" not in self._received:
            if not select.select(
                [self._process.stdout], [], [], max(until - time.monotonic(), 0.0)
            )[0]:
                raise RuntimeError(f"the launcher process did not answer within {seconds:.0f} s")
            data = os.read(self._process.stdout.fileno(), 65536)
            if not data:
                raise self._gone()
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _must_not_starve(self) -> None:
        """Raises MachineRefuses where the log says that this machine has refused a process or
        memory.
        """
        if isinstance(self._log, int):
            return
        if said := starving(Path(self._log.name).read_text(encoding="utf-8", errors="replace")):
            raise MachineRefuses(said)

    def _gone(self) -> Exception:
        """Why the launcher has ended. The verifier itself sends it no signal."""
        self._process.wait()
        self._must_not_starve()
        if self._process.returncode < 0:
            return MachineRefuses(f"the launcher process {_OUTSIDE}")
        return RuntimeError("the launcher process has died")

    def _end(self) -> None:
        """Close the input of the launcher, which then ends all that it has started; kill it with
        all below it if it does not.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS if self._made else 0.0)
        except subprocess.TimeoutExpired:
            processes.end_tree(self._process.pid)
            self._process.wait()
        self._process.stdout.close()
        if not isinstance(self._log, int):
            self._log.close()
