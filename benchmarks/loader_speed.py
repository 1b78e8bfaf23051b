"""Tokens a second of the generated loader beside a plain numpy loop and torch's DataLoader, on the
same token file, in one process.

    python benchmarks/loader_speed.py --out build/loader_speed.json

All draw windows of the same length in a random order, and give inputs and targets of a micro-batch
as int64 tensors. They read in turns, so that a noisy machine slows all; a figure is the median of
the rounds, a ratio that of the medians. `numpy` is a loop over a memory-mapped file, as many
scripts for pre-training have it; `DataLoader` has a map-style dataset and the default collate
function. Those of torchtitan and lingua, which tokenise text while they read it, are in
loader_text_speed.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import yaml
from torch.utils.data import DataLoader, Dataset

from machine import environment
from results_file import write
from verified_fsdp2.skill import scaffold, spec

LENGTH, MICRO, GLOBAL, VOCABULARY = 1024, 8, 64, 50_000
WORKERS = 2
Batch = tuple[torch.Tensor, torch.Tensor]
SPEC = {
    "version": 1,
    "model": {
        "kind": "decoder",
        "layers": 1,
        "width": 64,
        "heads": 2,
        "vocabulary": VOCABULARY,
        "sequence_length": LENGTH,
    },
    "train": {"steps": 100, "global_batch": GLOBAL, "micro_batch": MICRO},
}


class Windows(Dataset[Batch]):
    """Inputs and targets of one window of a memory-mapped file."""

    def __init__(self, path: Path) -> None:
        self.tokens = np.memmap(path, np.uint16, "r")

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // LENGTH

    def __getitem__(self, index: int) -> Batch:
        window = torch.from_numpy(
            self.tokens[index * LENGTH : (index + 1) * LENGTH + 1].astype(np.int64)
        )
        return window[:-1], window[1:]


def plain(path: Path) -> Iterator[Batch]:
    tokens, random = np.memmap(path, np.uint16, "r"), np.random.default_rng(0)
    while True:
        starts = random.integers(len(tokens) - LENGTH - 1, size=MICRO)
        inputs = [
            torch.from_numpy(tokens[start : start + LENGTH].astype(np.int64)) for start in starts
        ]
        targets = [
            torch.from_numpy(tokens[start + 1 : start + LENGTH + 1].astype(np.int64))
            for start in starts
        ]
        yield torch.stack(inputs), torch.stack(targets)


def of_torch(path: Path, workers: int) -> Iterator[Batch]:
    while True:
        yield from DataLoader(
            Windows(path), MICRO, shuffle=True, num_workers=workers, drop_last=True
        )


def generated(path: Path, folder: Path, workers: int) -> Iterator[Batch]:
    """The loader of a project whose spec names this file."""
    written = folder / f"spec-{workers}.yaml"
    data = {"kind": "tokens", "files": [str(path)], "dtype": "uint16", "workers": workers}
    written.write_text(yaml.safe_dump({**SPEC, "data": data}), encoding="utf-8")
    project = folder / f"project-{workers}"
    scaffold.write(scaffold.render(spec.load(written)), project)
    with modules_of(project) as data_module:
        samples = data_module.load_data(folder, LENGTH, VOCABULARY)[0]
        loader = data_module.GlobalBatches(samples, GLOBAL, MICRO, 0)
    return micro_batches(loader)


def micro_batches(loader: Any) -> Iterator[Batch]:
    position = 0
    while True:
        yield from loader.micro_batches(position)
        position += GLOBAL


class modules_of:
    """The modules of a project while it is imported; those of another have the same names."""

    def __init__(self, project: Path) -> None:
        self.project = project

    def __enter__(self) -> Any:
        for name in ("data", "corpus", "distributed"):
            sys.modules.pop(name, None)
        sys.path.insert(0, str(self.project))
        return __import__("data")

    def __exit__(self, *_: object) -> None:
        sys.path.remove(str(self.project))


def seconds(batches: Iterator[Batch], count: int) -> float:
    began = time.perf_counter()
    for inputs, targets in islice(batches, count):
        assert inputs.shape == targets.shape == (MICRO, LENGTH) and inputs.dtype == torch.int64
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--global-batches", type=int, default=40, help="read in each round by each loader"
    )
    parser.add_argument("--tokens", type=int, default=2**26, help="in the file")
    options = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(prefix="fsdp2-loader-") as name:
        folder, count = Path(name), options.global_batches * GLOBAL // MICRO
        path = folder / "tokens.bin"
        np.random.default_rng(0).integers(VOCABULARY, size=options.tokens, dtype=np.uint16).tofile(
            path
        )
        makers: dict[str, Callable[[], Iterator[Batch]]] = {
            "generated": lambda: generated(path, folder, 0),
            "numpy": lambda: plain(path),
            "DataLoader": lambda: of_torch(path, 0),
            f"generated, {WORKERS} workers": lambda: generated(path, folder, WORKERS),
            f"DataLoader, {WORKERS} workers": lambda: of_torch(path, WORKERS),
        }
        loaders = {what: make() for what, make in makers.items()}
        took: dict[str, list[float]] = {what: [] for what in loaders}
        for batches in loaders.values():
            seconds(batches, GLOBAL // MICRO)  # orders are drawn, workers started
        for _ in range(options.rounds):
            for what, batches in loaders.items():
                took[what].append(seconds(batches, count))
    rows = [
        {
            "loader": what,
            "tokens_per_second": round(count * MICRO * LENGTH / statistics.median(times)),
        }
        for what, times in took.items()
    ]
    speed = {row["loader"]: row["tokens_per_second"] for row in rows}
    ratios = {
        "generated / fastest other": round(
            speed["generated"] / max(speed["numpy"], speed["DataLoader"]), 3
        ),
        "generated / DataLoader, with workers": round(
            speed[f"generated, {WORKERS} workers"] / speed[f"DataLoader, {WORKERS} workers"], 3
        ),
    }
    for row in rows:
        print(f"{row['loader']:<24}{row['tokens_per_second']:>14,} tokens/s")
    print(*(f"{what}: {ratio}" for what, ratio in ratios.items()), sep="\n")
    if options.out:
        found = {"rounds": options.rounds, "tokens": options.tokens, "ratios": ratios, "rows": rows}
        write(options.out, {"environment": environment("numpy"), **found})
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
