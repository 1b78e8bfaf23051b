"""Tokens a second that the generated loader reads from JSON lines, beside those of lingua and
torchtitan on the same file, in one process.

    python benchmarks/loader_text_speed.py --lingua CHECKOUT --torchtitan CHECKOUT --out \\
        benchmarks/results/loader_text_speed.json

Tokens are the bytes of the text: lingua has such a tokenizer, torchtitan gets one (`Bytes`), so
that no tokenizer's speed is measured. Each loader fills windows of LENGTH tokens, one document
after the other, in its own order, in this process (torchtitan reads ahead in a thread). They read
in turns, so that a noisy machine slows all; a figure is the median of the rounds. lingua and
torchtitan encode while they read; a generated project encodes once (`prepare.py`): `once` counts
that time too, for a run that reads every token a single time.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from loader_speed import micro_batches, modules_of

from machine import environment
from results_file import write
from verified_fsdp2.skill import scaffold, spec

LENGTH, MICRO, GLOBAL = 1024, 8, 64
MODEL = {
    "kind": "decoder",
    "layers": 1,
    "width": 64,
    "heads": 2,
    "vocabulary": 256,
    "sequence_length": LENGTH,
}
TRAIN = {"steps": 100, "global_batch": GLOBAL, "micro_batch": MICRO}


class Bytes:
    """torchtitan's tokenizer, as it is asked for by its text processor."""

    eos_id = 255

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        return [*([254] if add_bos else []), *text.encode(), *([255] if add_eos else [])]


def made(path: Path, size: int) -> None:
    """About `size` bytes of documents of 200 to 4,000 bytes."""
    words = [
        "the",
        "model",
        "reads",
        "what",
        "was",
        "written",
        "once",
        "and",
        "learns",
        "to",
        "go",
        "on",
        "from",
        "there",
    ]
    chance, left = random.Random(0), size
    with path.open("w", encoding="utf-8") as file:
        while left > 0:
            text = " ".join(chance.choices(words, k=chance.randrange(40, 800)))
            file.write(json.dumps({"text": text}) + "\n")
            left -= len(text)


def generated(path: Path, folder: Path) -> tuple[Iterator[Any], float]:
    """The batches of a generated project, and the seconds of its `prepare.py`."""
    data = {"kind": "jsonl", "files": [str(path)], "field": "text", "packing": True}
    written, project = folder / "spec.yaml", folder / "project"
    written.write_text(
        yaml.safe_dump({"version": 1, "model": MODEL, "train": TRAIN, "data": data}),
        encoding="utf-8",
    )
    scaffold.write(scaffold.render(spec.load(written)), project)
    began = time.perf_counter()
    subprocess.run([sys.executable, "prepare.py"], cwd=project, check=True, capture_output=True)
    took = time.perf_counter() - began
    with modules_of(project) as module:
        samples = module.load_data(LENGTH)[0]
        return micro_batches(module.GlobalBatches(samples, GLOBAL, MICRO, 0)), took


def of_lingua(path: Path) -> Iterator[Any]:
    from lingua.data import DataArgs, build_dataloader_from_args, init_dataloader_state_from_args

    given = DataArgs(
        root_dir=str(path.parent.parent),
        sources={path.parent.name: 1.0},
        batch_size=MICRO,
        seq_len=LENGTH,
    )
    given.tokenizer.name, given.load_async = "bytes", False
    state = init_dataloader_state_from_args(given, 0, 1)
    with build_dataloader_from_args(given, state=state) as batches:
        for batch, _ in batches:
            both = torch.tensor(batch, dtype=torch.long)
            yield both[:, :, 0], both[:, :, 1]


def of_torchtitan(path: Path) -> Iterator[Any]:
    from torchtitan.components.data import (
        ConcatThenSplitPackingConfig,
        GrainDataLoader,
        IndexedJsonlSource,
        SingleDatasetConfig,
    )
    from torchtitan.hf_datasets.text_datasets import TextProcessor

    text = SingleDatasetConfig(
        source=IndexedJsonlSource.Config(patterns=(str(path),)), processor=TextProcessor.Config()
    )
    packed = ConcatThenSplitPackingConfig(dataset=text)
    loader = GrainDataLoader(
        GrainDataLoader.Config(dataset=packed),
        dp_world_size=1,
        dp_rank=0,
        tokenizer=Bytes(),
        max_context_length=LENGTH,
        num_tokens_per_batch=MICRO * LENGTH,
    )
    for inputs, labels in loader:
        yield inputs["input"].view(MICRO, LENGTH), labels.view(MICRO, LENGTH)


def seconds(batches: Iterator[Any], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        inputs, targets = next(batches)
        assert inputs.shape == targets.shape == (MICRO, LENGTH)
        assert inputs.dtype == torch.int64
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lingua", type=Path, help="a checkout")
    parser.add_argument("--torchtitan", type=Path, help="a checkout")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--batches", type=int, default=200, help="read in each round by each loader"
    )
    parser.add_argument("--megabytes", type=int, default=64, help="of text in the file")
    options = parser.parse_args()
    sys.path[:0] = [str(checkout) for checkout in (options.lingua, options.torchtitan) if checkout]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(prefix="fsdp2-loader-") as name:
        path = Path(name, "data", "notes", "notes.chunk.0.jsonl")
        path.parent.mkdir(parents=True)
        made(path, options.megabytes << 20)
        ours, once = generated(path, Path(name))
        makers: dict[str, Callable[[Path], Iterator[Any]]] = {
            "lingua": of_lingua,
            "torchtitan": of_torchtitan,
        }
        loaders = {
            "generated": ours,
            **{what: make(path) for what, make in makers.items() if getattr(options, what)},
        }
        for batches in loaders.values():
            seconds(batches, 2 * GLOBAL // MICRO)
        took: dict[str, list[float]] = {what: [] for what in loaders}
        for _ in range(options.rounds):
            for what, batches in loaders.items():
                took[what].append(seconds(batches, options.batches))
    tokens = options.batches * MICRO * LENGTH
    speed = {what: tokens / statistics.median(times) for what, times in took.items()}
    whole = options.megabytes << 20
    speed["generated, once"] = whole / (once + whole / speed["generated"])
    for what, rate in speed.items():
        print(f"{what:<18}{rate:>14,.0f} tokens/s")
    if options.out:
        rows = [{"loader": what, "tokens_per_second": round(rate)} for what, rate in speed.items()]
        about = {
            "rounds": options.rounds,
            "megabytes": options.megabytes,
            "prepare_seconds": round(once, 2),
        }
        write(options.out, {"environment": environment("numpy"), **about, "rows": rows})
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
