"""What a project makes once, before its runs: such as the tokens that they map into memory."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ..errors import UserError
from .processes import end_tree


def prepare(command: Sequence[str], cwd: Path, timeout: float, log: Path) -> None:
    """Run the command; `log` gets its output. Raises UserError with all of that if it fails or takes longer than the time-out."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
            trouble = f"ended with status {code}" if code else ""
        except subprocess.TimeoutExpired:
            trouble = f"took longer than {timeout:g} s: run it before, or allow more with --timeout"
        finally:
            if process.poll() is None:
                end_tree(process.pid)
                process.wait()
    if trouble:
        text = log.read_text(encoding="utf-8", errors="replace").rstrip()
        raise UserError(f"prepare: {shlex.join(command[1:])} {trouble}" + (f"\n{text}" if text else ""))
