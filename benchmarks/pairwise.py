"""A pairwise sample of specs: every two settings that a spec may have together stand together in
one that is verified.

    python benchmarks/pairwise.py --out benchmarks/results/pairwise.json
    python benchmarks/pairwise.py --out benchmarks/results/pairwise.json --add --minutes 30

Each is generated, linted, trained and verified as `examples.py` does it. What `spec check` refuses
is no pair. With `--add`, the rows of the file stay, and combinations are run that hold pairs which
none of them holds; an axis that is newer than a row has its first setting there. `possible` in the
file is the number of pairs there are, `pairs` of those that have been run.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml

from examples import ROOT, row
from machine import environment
from results_file import write
from verified_fsdp2.skill import spec
from verified_fsdp2.verifier.errors import UserError

Settings = dict[str, Any]
Combination = dict[str, str]  # the setting of each axis, by label
Pair = tuple[tuple[str, str], ...]
FREE = "schedule-free"
LENGTH = {"vocabulary": 256, "sequence_length": 32}
DECODER: Settings = {"kind": "decoder", "layers": 3, "width": 64, "heads": 4, **LENGTH}
OWN: Settings = {"kind": "import", "import": "own_parts:build", "shard": ["Block"], **LENGTH}
SMALL = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {
    "model_type": "llama",
    **SMALL,
    "intermediate_size": 128,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
}
DROPLESS = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LORA = {"kind": "lora", "rank": 4, "alpha": 8}
MOE: Settings = {**DECODER, "experts": {"number": 4, "top_k": 2, "shared": 1, "first_dense": 1}}
WINDOW: Settings = {**DECODER, "qk_norm": True, "window": 8, "full_attention_every": 2}
CHAT = {
    "kind": "chat",
    "files": ["chats.jsonl"],
    "tokenizer": "chat-tokenizer",
    "packing": "documents",
}
MIXTURE = [
    {"name": "json", "files": ["{stdlib}/json/*.py"], "weight": 3},
    {"name": "asyncio", "files": ["{stdlib}/asyncio/*.py"], "weight": 1},
]


def transformers(config: Settings) -> Settings:
    return {"kind": "transformers", "config": {**config, "max_position_embeddings": 64}, **LENGTH}


AXES: dict[str, dict[str, Settings]] = {
    "mesh": {
        "fsdp-2": {"verify": {"nproc": 2, "reshard_to": [1, 4]}},
        "fsdp-4": {"verify": {"nproc": 4, "reshard_to": [2]}},
        "hsdp-2x2": {"parallel.dp_replicate": 2, "verify": {"nproc": 4, "reshard_to": [1, 2]}},
        "tp-2": {"parallel.tp": 2, "verify": {"nproc": 4, "reshard_to": [1, 2]}},
        "hsdp-tp": {
            "parallel.dp_replicate": 2,
            "parallel.tp": 2,
            "verify": {"nproc": 4, "reshard_to": [1]},
        },
        "cp-2": {"parallel.cp": 2, "verify": {"nproc": 4, "reshard_to": [1, 2]}},
    },
    "model": {
        "decoder": {"model": DECODER},
        "decoder-grouped-untied": {"model": {**DECODER, "kv_heads": 2, "tied_embeddings": False}},
        "decoder-freeze": {
            "model": DECODER,
            "finetune": {"kind": "freeze", "train": ["^blocks\\.2\\.", "norm"]},
        },
        "decoder-lora": {
            "model": DECODER,
            "finetune": {**LORA, "targets": ["query", "feed_forward.up"]},
        },
        "decoder-window": {"model": WINDOW},
        "experts": {"model": MOE},
        "experts-lora": {
            "model": MOE,
            "finetune": {**LORA, "targets": ["query", "value", "gate", "down"]},
        },
        "import": {"model": OWN},
        "import-rank-0": {"model": {**OWN, "initialize": "rank-0"}},
        "llama": {"model": transformers(LLAMA)},
        "llama-lora": {
            "model": transformers(LLAMA),
            "finetune": {**LORA, "targets": ["q_proj", "v_proj"]},
        },
        "gpt2": {"model": {**transformers(GPT2), "config": GPT2 | DROPLESS}},
    },
    "data": {
        "synthetic": {"data": {"kind": "synthetic"}},
        "text": {"data": {"kind": "text", "files": ["{stdlib}/json/*.py"]}},
        "text-workers": {"data": {"kind": "text", "files": ["{stdlib}/json/*.py"], "workers": 2}},
        "documents": {
            "data": {
                "kind": "jsonl",
                "files": ["notes.jsonl"],
                "packing": False,
                "too_long": "truncate",
            }
        },
        "documents-packed": {
            "data": {
                "kind": "jsonl",
                "files": ["notes.jsonl"],
                "packing": "documents",
                "too_long": "truncate",
            }
        },
        "chat": {"data": CHAT, "model.vocabulary": 258, "model.sequence_length": 256},
        "mixture": {
            "data": {"kind": "text", "mixture": MIXTURE, "validation": {"this": "{stdlib}/this.py"}}
        },
    },
    "checkpointing": {
        "none": {},
        "full": {"memory.activation_checkpointing": "full"},
        "op-selective": {"memory.activation_checkpointing": "op-selective"},
    },
    "schedule": {
        "cosine": {"schedule": {"kind": "cosine", "warmup_steps": 2}},
        "linear": {"schedule": {"kind": "linear", "warmup_steps": 0}},
        "wsd": {"schedule": {"kind": "wsd", "warmup_steps": 2, "decay_steps": 4}},
        "constant": {"schedule": {"kind": "constant", "warmup_steps": 1}},
        FREE: {
            "schedule": {"kind": "constant", "warmup_steps": 2},
            "optimizer.kind": "schedule_free",
        },
    },
    "saves": {
        "sync": {"checkpoint.mode": "sync"},
        "thread": {"checkpoint.mode": "thread", "checkpoint.export": True},
        "process": {"checkpoint.mode": "process"},
    },
    "optimizer": {
        "adamw": {"optimizer": {"lr": 2.0e-3}},
        "adamw-matrices": {"optimizer": {"lr": 2.0e-3, "decay_only_matrices": True}},
        "sgd": {"optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.9}},
        "muon": {"optimizer": {"kind": "muon", "lr": 2.0e-3}},
    },
    "precision": {
        "float32": {"precision.param_dtype": "float32"},
        "bfloat16": {"precision.param_dtype": "bfloat16"},
    },
    "loss": {"whole": {}, "chunked": {"memory.chunked_loss": True}},
    "compile": {"eager": {}, "compiled": {"memory.compile": True}},
    "offload": {"device": {}, "cpu": {"parallel.cpu_offload": True}},
    "reshard": {
        "after-forward": {},
        "kept": {"parallel.reshard_after_forward": False},
        "to-2-ranks": {"parallel.reshard_after_forward": 2},
    },
    "prefetch": {"torch": {}, "ahead": {"parallel.prefetch": {"forward": 1, "backward": 1}}},
    "batch": {"whole": {"train.micro_batch": 4}, "accumulated": {"train.micro_batch": 2}},
    "clipping": {"1.0": {"train.max_norm": 1.0}, "none": {"train.max_norm": None}},
    "operation": {
        "plain": {},
        "watched": {
            "operation": {"progress": True, "profile": True},
            "memory.gc_interval": 2,
        },
    },
}
BASE: Settings = {"version": 1, "train": {"steps": 12, "global_batch": 16, "validate_interval": 6}}
OWN_PARTS = '''"""A model of one's own."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, x):
        mixed = x.cumsum(dim=1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return x + self.outer(torch.relu(self.inner(self.norm(mixed))))


class Model(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build():
    return Model()
'''


def sample(left: set[Pair], folder: Path) -> Iterator[Combination]:
    """Combinations that hold all of these pairs: each begins with one not held yet and takes in
    what it can.
    """
    while left:
        labels = dict(min(left))
        for axis in AXES:
            if axis not in labels:
                tried = [{**labels, axis: label} for label in AXES[axis]]
                allowed = [one for one in tried if refusal(one, folder) == ""]
                labels = max(allowed, key=lambda one: len(pairs([one]) & left))
        drawn = {axis: labels[axis] for axis in AXES}
        left = left - pairs([drawn])
        yield drawn


def pairs(rows: Iterable[Combination]) -> set[Pair]:
    """Every two settings that stand together."""
    return {pair for labels in rows for pair in combinations(sorted(labels.items()), 2)}


def complete(labels: Combination) -> Combination:
    """With the first setting of each axis that has none."""
    return {axis: labels.get(axis, next(iter(choices))) for axis, choices in AXES.items()}


def possible_pairs(folder: Path) -> set[Pair]:
    """Those that `spec check` accepts, with the first setting of every other axis."""
    every = combinations(sorted(AXES), 2)
    found = {
        ((first, a), (second, b))
        for first, second in every
        for a in AXES[first]
        for b in AXES[second]
    }
    return {pair for pair in found if refusal(dict(pair), folder) == ""}


def written(labels: Combination, name: str) -> str:
    """The spec of a combination; an axis without a label has its first."""
    values: Settings = {**BASE, "name": name}
    for key, value in settings(labels):
        section, _, inner = key.partition(".")
        values[section] = {**values.get(section, {}), **({inner: value} if inner else value)}
    if "config" in values["model"]:
        values["model"]["config"] = {
            **values["model"]["config"],
            "vocab_size": values["model"]["vocabulary"],
        }
    return yaml.safe_dump(values, sort_keys=False)


def settings(labels: Combination) -> list[tuple[str, Any]]:
    """The keys that a combination writes, in the order of the axes."""
    return [item for axis, label in complete(labels).items() for item in AXES[axis][label].items()]


def refusal(labels: Combination, folder: Path) -> str:
    """What `spec check` says against a combination, or that one of its settings is replaced by
    another; empty if nothing.
    """
    path = folder / "tried.yaml"
    path.write_text(written(labels, "tried"), encoding="utf-8")
    try:
        values = spec.load(path)
    except UserError as error:
        return str(error)
    replaced = labels.get("schedule") == FREE and values["optimizer"]["kind"] != "schedule_free"
    return "optimizer.kind is replaced" if replaced else ""


def make_files(folder: Path) -> None:
    """What the specs read."""
    (folder / "own_parts.py").write_text(OWN_PARTS, encoding="utf-8")
    texts = (
        f"Note {number}: " + "all that is seen is written down. " * (1 + number % 3)
        for number in range(300)
    )
    (folder / "notes.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8"
    )
    shutil.copy(ROOT / "examples" / "chats.jsonl", folder)
    shutil.copytree(
        ROOT / "examples" / "chat-tokenizer", folder / "chat-tokenizer", dirs_exist_ok=True
    )


def verified(number: int, labels: Combination, folder: Path) -> dict[str, Any]:
    """The row of one combination."""
    path = folder / f"combination-{number:02}.yaml"
    path.write_text(written(labels, path.stem), encoding="utf-8")
    found = row(path, folder)
    return {"combination": labels, **{key: value for key, value in found.items() if key != "spec"}}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument(
        "--add", action="store_true", help="keep the rows of the file, and run what they leave out"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin no combination after this time"
    )
    parser.add_argument("--list", action="store_true", help="show the combinations and verify none")
    options = parser.parse_args()
    if options.add and not options.out:
        parser.error("--add needs --out, the file whose rows stay")
    rows: list[dict[str, Any]] = (
        json.loads(options.out.read_text(encoding="utf-8"))["rows"] if options.add else []
    )
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fsdp2-pairwise-") as name:
        folder = Path(name)
        make_files(folder)
        possible = possible_pairs(folder)
        left = possible - pairs(complete(row["combination"]) for row in rows)
        print(f"{len(possible)} pairs, of which {len(left)} are not held", flush=True)
        for number, labels in enumerate(sample(left, folder), start=len(rows) + 1):
            if time.monotonic() - started > 60 * options.minutes:
                break
            print(f"{number:>3} {' '.join(labels.values())}", flush=True)
            if not options.list:
                rows.append(found := verified(number, labels, folder))
                print(
                    f"    {found['verdict']} {found['seconds']} s {' '.join(found['findings'])}",
                    flush=True,
                )
            if options.out and not options.list:  # after each: the next may take long
                held = len(pairs(complete(row["combination"]) for row in rows) & possible)
                write(
                    options.out,
                    {
                        "environment": environment(),
                        "pairs": held,
                        "possible": len(possible),
                        "rows": rows,
                    },
                )
    return 0 if all(r["verdict"] == "pass" and r["linted"] for r in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
