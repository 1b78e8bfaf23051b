"""One TOML file, one dataclass for each of its sections, and `--section.key=value` on the command line."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints


@dataclass
class Model:
    dim: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 8
    vocabulary: int = 512
    context: int = 256
    ffn_multiple: int = 32
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def hidden(self) -> int:
        """Width of the gated feed-forward: 8/3 of the model, rounded up."""
        raw = int(8 * self.dim / 3)
        return self.ffn_multiple * -(-raw // self.ffn_multiple)


@dataclass
class Data:
    documents: int = 1000
    shortest: int = 8
    longest: int = 64
    seed: int = 0


@dataclass
class Parallel:
    dp_replicate: int = 1
    dp_shard: int = -1
    param_dtype: str = "float32"
    reduce_dtype: str = "float32"
    reshard_after_forward: bool = True


@dataclass
class Optim:
    lr: float = 3e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1
    warmup: int = 10
    min_ratio: float = 0.1
    max_norm: float = 1.0


@dataclass
class Train:
    steps: int = 1000
    global_batch: int = 64
    micro_batch: int = 8
    seed: int = 0


@dataclass
class Checkpoint:
    folder: str = "out"
    interval: int = 100
    keep: int = 3
    load: str = ""


@dataclass
class Metrics:
    every: int = 10
    file: str = ""


@dataclass
class Config:
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    parallel: Parallel = field(default_factory=Parallel)
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)


def parse(argv: list[str]) -> Config:
    """The configuration of a command line: the file of `--config`, then the overrides in their order."""
    config = Config()
    rest = []
    words = iter(argv)
    for word in words:
        if word == "--config":
            apply(config, tomllib.loads(Path(next(words)).read_text(encoding="utf-8")))
        else:
            rest.append(word)
    for word in rest:
        key, _, text = word.removeprefix("--").partition("=")
        section, _, name = key.partition(".")
        apply(config, {section: {name: literal(text)}})
    check(config)
    return config


def literal(text: str) -> Any:
    """A command-line value by the rules of TOML; what TOML does not know is a plain string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def apply(config: Config, values: dict[str, dict[str, Any]]) -> None:
    """Write `values` over the configuration. Raises SystemExit for an unknown key."""
    for section, keys in values.items():
        if not hasattr(config, section):
            raise SystemExit(f"unknown section {section!r}")
        part = getattr(config, section)
        known = {item.name for item in fields(part)}
        types = get_type_hints(type(part))
        for key, value in keys.items():
            if key not in known:
                raise SystemExit(f"unknown key {section}.{key}")
            setattr(part, key, float(value) if types[key] is float else value)


def check(config: Config) -> None:
    """What would fail late or train something else fails here."""
    if config.model.dim % config.model.heads or config.model.heads % config.model.kv_heads:
        raise SystemExit("model.dim must divide by model.heads, and those by model.kv_heads")
    if config.train.global_batch % config.train.micro_batch:
        raise SystemExit("train.global_batch must divide by train.micro_batch")
    if config.optim.warmup >= config.train.steps:
        raise SystemExit("optim.warmup must be shorter than train.steps")
