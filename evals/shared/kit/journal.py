"""Numbers of a run: one line a record in a JSON-lines file, and a short line on the console. Only rank 0 writes."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from . import comm


class Journal:
    """A file in the run's folder. A run that goes on after a restart appends, and drops what it is about to do again."""

    def __init__(self, folder: Path, name: str, first: int = 0, console: bool = False) -> None:
        self.path = Path(folder) / name
        self.console = console
        self.began = time.perf_counter()
        if comm.is_main():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            kept = [row for row in self.rows() if row["step"] <= first] if first else []
            self.path.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")

    def rows(self) -> list[dict[str, Any]]:
        """What is in the file."""
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines() if line.strip()]

    @comm.only_main
    def write(self, step: int, **numbers: float) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **numbers}) + "\n")
        if self.console:
            print(self.line(step, numbers), flush=True)

    def line(self, step: int, numbers: dict[str, float]) -> str:
        words = [f"{key} {shown(value)}" for key, value in numbers.items()]
        return f"[{time.perf_counter() - self.began:7.1f}s] {step:>6} | " + " | ".join(words)


def shown(value: float) -> str:
    """A number in few characters."""
    if isinstance(value, int) or not math.isfinite(value):
        return str(value)
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 else f"{value:.2e}"


@comm.only_main
def say(text: str) -> None:
    print(text, flush=True)
