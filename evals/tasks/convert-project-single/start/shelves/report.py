"""What a run did: python -m shelves.report runs/town [runs/other ...]"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def summary(folder: Path) -> dict[str, float]:
    """The last numbers of a run, and the best ones of its validations."""
    steps, validations = rows(folder / "train.jsonl"), rows(folder / "val.jsonl")
    if not steps:
        raise SystemExit(f"{folder}: no step yet")
    last = steps[-min(len(steps), 10) :]
    result = {"steps": steps[-1]["step"], "loss": sum(row["loss"] for row in last) / len(last)}
    result["clipped"] = sum(row["norm"] > 1 for row in steps) / len(steps)
    if validations:
        best = min(validations, key=lambda row: row["val_loss"])
        result |= {"best_step": best["step"], "val_loss": best["val_loss"], "mrr": best["mrr"]}
    return result


def main(folders: list[str]) -> None:
    if not folders:
        raise SystemExit(__doc__)
    table = {folder: summary(Path(folder)) for folder in folders}
    columns = ("steps", "loss", "clipped", "best_step", "val_loss", "mrr")
    width = max(len(folder) for folder in folders)
    print(" " * width, *(f"{column:>10}" for column in columns))
    for folder, numbers in table.items():
        cells = [f"{numbers[c]:>10.4g}" if c in numbers else f"{'-':>10}" for c in columns]
        print(folder.ljust(width), *cells)


if __name__ == "__main__":
    main(sys.argv[1:])
