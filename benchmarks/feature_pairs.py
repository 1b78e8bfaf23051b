"""Every two of 17 features together: what `spec check` refuses, and the verdict of what it allows.

    python benchmarks/feature_pairs.py                  # the table of refusals, a minute
    python benchmarks/feature_pairs.py --run --out benchmarks/results/feature_pairs.json

With `--run`, each allowed pair is generated, linted, trained and verified as `examples.py` does it:
on one rank, as DDP, and on the ranks of its mesh, resumed on others. The rows of the file stay, and
pairs that have none are run until the minutes are over. float8 needs a GPU: without one its pairs
are left out.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import yaml

from examples import row
from machine import environment
from pairwise import LORA, make_files
from results_file import write
from verified_fsdp2.skill import spec
from verified_fsdp2.verifier.errors import UserError

FEATURES: dict[str, dict[str, Any]] = {
    "hsdp": {"parallel.dp_replicate": 2},
    "tp": {"parallel.tp": 2},
    "cp": {"parallel.cp": 2},
    "ep": {"parallel.ep": 2},
    "experts": {"model.experts": {"number": 4, "top_k": 2, "shared": 1, "first_dense": 1}},
    "compile": {"memory.compile": True},
    "fp8": {"precision": {"fp8": True, "param_dtype": "bfloat16"}},
    "full": {"memory.activation_checkpointing": "full"},
    "op-selective": {"memory.activation_checkpointing": "op-selective"},
    "chunked-loss": {"memory.chunked_loss": True},
    "cpu-offload": {"parallel.cpu_offload": True},
    "muon": {"optimizer": {"kind": "muon", "lr": 2.0e-3}},
    "adamw8bit": {"optimizer": {"kind": "adamw8bit", "lr": 2.0e-3}},
    "lora": {"finetune": {**LORA, "targets": ["query", "output", "down"]}},
    "packing": {
        "data": {
            "kind": "jsonl",
            "files": ["notes.jsonl"],
            "packing": "documents",
            "too_long": "truncate",
        }
    },
    "window": {"model.window": 8, "model.full_attention_every": 2},
    "async-save": {"checkpoint.mode": "thread"},
}
IMPLIED = {"ep": "experts"}  # a feature that another one needs
BASE: dict[str, Any] = {
    "version": 1,
    "model": {
        "kind": "decoder",
        "layers": 3,
        "width": 64,
        "heads": 4,
        "ffn": 128,
        "vocabulary": 256,
        "sequence_length": 32,
        "tied_embeddings": False,
    },
    "data": {"kind": "synthetic"},
    "precision": {"param_dtype": "float32"},
    "train": {"steps": 12, "global_batch": 16, "micro_batch": 2, "validate_interval": 6},
}
MESH = ("hsdp", "tp", "cp")


def pairs() -> list[tuple[str, str]]:
    """The 136 pairs, in the order of FEATURES."""
    return list(combinations(FEATURES, 2))


def written(pair: tuple[str, str]) -> dict[str, Any]:
    """The spec of a pair."""
    wanted = [*pair, *(IMPLIED[one] for one in pair if one in IMPLIED)]
    dims = sum(one in MESH for one in wanted)
    ranks = 2 ** (dims + 1) if dims or "ep" in wanted else 2
    ranks = max(ranks, 4) if "ep" in wanted else ranks
    values: dict[str, Any] = {**BASE, "name": "-".join(pair)}
    values["verify"] = {"nproc": ranks, "reshard_to": [1, ranks // 2 if dims else 2 * ranks]}
    for one in wanted:
        for key, value in FEATURES[one].items():
            section, _, inner = key.partition(".")
            added = {inner: value} if inner else value
            values[section] = {**values.get(section, {}), **added}
    return values


def refusal(pair: tuple[str, str], folder: Path) -> str:
    """What `spec check` says against a pair; empty if nothing."""
    try:
        spec.load(saved(pair, folder))
    except UserError as error:
        return str(error)
    return ""


def saved(pair: tuple[str, str], folder: Path) -> Path:
    path = folder / ("-".join(pair) + ".yaml")
    path.write_text(yaml.safe_dump(written(pair), sort_keys=False), encoding="utf-8")
    return path


def run(pair: tuple[str, str], folder: Path) -> dict[str, Any]:
    """The row of an allowed pair."""
    found = row(saved(pair, folder), folder)
    return {"pair": list(pair), **{key: value for key, value in found.items() if key != "spec"}}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", action="store_true", help="verify the pairs that are allowed")
    parser.add_argument("--only", default="", help="these pairs: A+B,C+D")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    there = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    rows: list[dict[str, Any]] = there.get("rows", [])
    done = {tuple(one["pair"]) for one in rows}
    until = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="fsdp2-pairs-") as name:
        folder = Path(name)
        make_files(folder)
        refused = {pair: why for pair in pairs() if (why := refusal(pair, folder))}
        for pair, why in refused.items():
            print(f"{pair[0]} x {pair[1]}: {' '.join(why.split())[:300]}")
        print(f"{len(refused)} of {len(pairs())} pairs are refused")
        for pair in pairs() if options.run else ():
            wanted = not options.only or "+".join(pair) in options.only.split(",")
            wanted = wanted and ("fp8" not in pair or torch.cuda.is_available())
            if pair in refused or pair in done or not wanted or time.monotonic() > until:
                continue
            rows.append(run(pair, folder))
            print(json.dumps(rows[-1]), flush=True)
            if options.out:
                found = {"environment": environment(), "refused": len(refused), "rows": rows}
                write(options.out, found)
    return int(any(one["verdict"] != "pass" for one in rows))


if __name__ == "__main__":
    raise SystemExit(main())
