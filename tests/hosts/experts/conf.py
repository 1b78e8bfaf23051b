"""Settings: nested dataclasses, presets, and `a.b=c` words that change them."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any


@dataclass
class Net:
    width: int = 128
    depth: int = 6
    heads: int = 4
    experts: int = 8
    picked: int = 2
    hidden: int = 256
    window: int = 24


@dataclass
class Task:
    modulus: int = 61
    terms: int = 3
    seed: int = 100
    noise: float = 0.0


@dataclass
class Batch:
    size: int = 64  # samples in one update, over all ranks
    micro: int = 16  # samples in one forward of a rank


@dataclass
class Fit:
    updates: int = 500
    matrix_lr: float = 0.02
    matrix_momentum: float = 0.9
    matrix_decay: float = 0.01
    vector_lr: float = 0.003
    warmup: int = 10
    router_penalty: float = 1e-3
    clip: float = 1.0
    seed: int = 1


@dataclass
class Shard:
    prefetch: int = 1
    keep_last: bool = True  # the last block is gathered again at once: leave it gathered
    param: str = "float32"
    reduce: str = "float32"


@dataclass
class Io:
    dir: str = "runs"
    save_every: int = 100
    probe_every: int = 4
    resume: bool = False


@dataclass
class Settings:
    net: Net = field(default_factory=Net)
    task: Task = field(default_factory=Task)
    batch: Batch = field(default_factory=Batch)
    fit: Fit = field(default_factory=Fit)
    shard: Shard = field(default_factory=Shard)
    io: Io = field(default_factory=Io)


PRESETS: dict[str, list[str]] = {
    "default": [],
    "tiny": [
        "net.width=32",
        "net.depth=3",
        "net.experts=4",
        "net.hidden=48",
        "net.heads=2",
        "net.window=12",
        "task.modulus=23",
        "batch.size=16",
        "batch.micro=4",
        "fit.updates=24",
        "fit.warmup=3",
        "fit.clip=0.3",
    ],
    "wide": ["net.width=512", "net.experts=16", "net.hidden=512", "fit.matrix_lr=0.01"],
}


def settings(words: Iterable[str]) -> Settings:
    """The settings of a command line: `preset=NAME` first, whatever its place, then every other word."""
    changes = [word.partition("=") for word in words]
    chosen = next((value for key, _, value in changes if key == "preset"), "default")
    if chosen not in PRESETS:
        raise SystemExit(f"preset={chosen}: known are {', '.join(PRESETS)}")
    made = Settings()
    for word in PRESETS[chosen]:
        put(made, *word.split("=", 1))
    for key, equals, value in changes:
        if not equals:
            raise SystemExit(f"{key}: expected a.b=c")
        if key != "preset":
            put(made, key, value)
    return made


def put(made: Settings, key: str, text: str) -> None:
    """Change one value; its type stays."""
    *path, last = key.split(".")
    part: Any = made
    for step in path:
        part = getattr(part, step, None)
    if not is_dataclass(part) or not hasattr(part, last):
        raise SystemExit(f"{key}: no such setting")
    old = getattr(part, last)
    if isinstance(old, bool):
        value: Any = text.lower() in ("1", "true", "yes")
    elif isinstance(old, str):
        value = text
    else:
        value = type(old)(ast.literal_eval(text))
    setattr(part, last, value)


def flat(made: Settings) -> dict[str, Any]:
    """`a.b: c` for a log or a checkpoint."""
    return {f"{name}.{key}": value for name, part in asdict(made).items() for key, value in part.items()}
