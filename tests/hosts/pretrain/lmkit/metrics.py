"""One line for each logged step, on rank 0, on the screen and in a JSON-lines file."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch.distributed as dist

from .config import Metrics


class Meter:
    """Knows when to speak and how fast the run is."""

    def __init__(self, config: Metrics) -> None:
        self.config = config
        self.since, self.tokens = time.perf_counter(), 0

    def log(self, step: int, tokens: int, **values: float) -> None:
        """Count a step's tokens, and write the step down if it is its turn."""
        self.tokens += tokens
        if step % self.config.every or dist.get_rank() != 0:
            return
        now = time.perf_counter()
        line = {"step": step, **values, "tokens_per_second": round(self.tokens / (now - self.since))}
        self.since, self.tokens = now, 0
        print(json.dumps(line), flush=True)
        if self.config.file:
            with Path(self.config.file).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
