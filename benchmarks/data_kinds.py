"""Every kind of data with the real packages: generated, linted, trained and verified on small data
that this script makes.

    pip install -c constraints.txt '.[test,data]'
    python benchmarks/data_kinds.py --out build/data_kinds.json

The verdict is that of `fsdp2 verify`: among others the same samples on one, two and four ranks, and
after a resume on other numbers of ranks. `workers` read ahead in every second row; the samples of
`import` are augmented at random.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import yaml

from examples import row
from machine import environment
from results_file import write

DECODER = {
    "kind": "decoder",
    "layers": 1,
    "width": 32,
    "heads": 2,
    "vocabulary": 512,
    "sequence_length": 32,
}
IMPORTED = {"kind": "import", "import": "own_parts:build", "shard": ["Block"], "vocabulary": 2}
TOKENIZED = {"tokenizer": "tokenizer.json", "separator": "<|end|>"}
KINDS: dict[str, dict[str, Any]] = {
    "text": {"kind": "text", "files": ["text"], "workers": 1},
    "text-tokenizer": {"kind": "text", "files": ["text"], **TOKENIZED},
    "tokens": {"kind": "tokens", "files": ["tokens"], "workers": 1},
    "jsonl": {"kind": "jsonl", "files": ["notes.jsonl"], **TOKENIZED},
    "jsonl-documents": {
        "kind": "jsonl",
        "files": ["notes.jsonl"],
        "packing": False,
        "too_long": "truncate",
        "workers": 2,
        **TOKENIZED,
    },
    "datasets": {"kind": "datasets", "folder": "dataset", **TOKENIZED},
    "datasets-split": {
        "kind": "datasets",
        "folder": "splits",
        "split": "train",
        "packing": False,
        "workers": 1,
    },
    "images": {"kind": "images", "folder": "images", "image_size": 16, "workers": 2},
    "import": {"kind": "import", "import": "own_parts:load"},
    "import-workers": {"kind": "import", "import": "own_parts:load", "workers": 2},
}
PACKAGES = ("torch", "numpy", "tokenizers", "datasets", "pillow")
OWN_PARTS = '''"""A model and data of one's own."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x):
        return x + torch.relu(self.layer(x))


def build():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(3 * 16 * 16, 32), Block(), Block(), nn.Linear(32, 2)
    )


class Noisy:
    def __init__(self, numbers):
        self.numbers = numbers

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        number = self.numbers[index]
        image = torch.full((3, 16, 16), number % 7 / 7) + 0.1 * torch.randn(3, 16, 16)
        return image.flip(-1) if torch.rand(()) < 0.5 else image, torch.tensor(int(number % 7 > 3))


def load():
    return Noisy(range(200)), Noisy(range(200, 220))
'''


def make_data(folder: Path, records: list[str]) -> None:
    """The same texts as files, JSON lines, tokens and datasets; and two classes of images."""
    import datasets
    import numpy as np
    from PIL import Image
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    (folder / "own_parts.py").write_text(OWN_PARTS)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(records, trainer)
    tokenizer.enable_truncation(8)  # as such files often carry it
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()

    for name in ("text", "tokens"):
        (folder / name).mkdir()
    third = len(records) // 3
    for number in range(3):
        part = "\n\n".join(records[number * third : (number + 1) * third])
        (folder / "text" / f"{number}.txt").write_text(part)
        ids = np.array(tokenizer.encode(part).ids)
        if number:
            ids.astype("<u2").tofile(folder / "tokens" / f"{number}.bin")
        else:
            np.save(folder / "tokens" / f"{number}.npy", ids)
    (folder / "notes.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in records)
    )
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_dict({"id": list(range(len(records))), "text": records})
    rows.save_to_disk(str(folder / "dataset"))
    datasets.DatasetDict({"train": rows, "test": rows.select(range(9))}).save_to_disk(
        str(folder / "splits")
    )

    noise = np.random.default_rng(0)
    for label, low in (("dark", 0), ("light", 16)):
        (folder / "images" / label).mkdir(parents=True)
        for number in range(60):
            pixels = noise.integers(low, low + 200, (20, 30, 3), np.uint8)
            Image.fromarray(pixels).save(
                folder / "images" / label / f"{number}.{'png' if number % 2 else 'jpg'}"
            )


def specs(folder: Path) -> list[Path]:
    found = []
    for name, data in KINDS.items():
        model = IMPORTED if data["kind"] in ("images", "import") else DECODER
        found.append(folder / f"{name}.yaml")
        rest = {
            "precision": {"param_dtype": "float32"},
            "optimizer": {"lr": 3.0e-3},
            "schedule": {"warmup_steps": 2},
            "train": {"steps": 20, "global_batch": 16, "micro_batch": 2},
        }
        found[-1].write_text(
            yaml.safe_dump({"version": 1, "name": name, "model": model, "data": data, **rest})
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--only", default="", help="kinds whose name contains this")
    options = parser.parse_args()
    chance = random.Random(0)
    words = [
        "ridge",
        "lamp",
        "oak",
        "north",
        "quiet",
        "seven",
        "river",
        "under",
        "copper",
        "again",
        "slow",
        "bright",
    ]
    records = [" ".join(chance.choices(words, k=chance.randint(3, 40))) for _ in range(300)]
    rows = []
    with tempfile.TemporaryDirectory(prefix="fsdp2-data-") as name:
        folder = Path(name)
        make_data(folder, records)
        os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(
            os.pathsep
        )
        for path in specs(folder):
            if options.only in path.stem:
                rows.append(found := row(path, folder / "projects"))
                print(found, flush=True)
    if options.out:
        write(options.out, {"environment": environment(*PACKAGES), "rows": rows})
    return 0 if all(found["verdict"] == "pass" and found["linted"] for found in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
