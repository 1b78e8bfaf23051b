"""The recipe: a JSON file as frozen dataclasses."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

Section = TypeVar("Section")


@dataclass(frozen=True)
class Base:
    """The model that is adapted."""

    width: int
    layers: int
    heads: int
    context: int
    seed: int


@dataclass(frozen=True)
class Adapter:
    """Low-rank updates: on which linear layers, how strong; `extra` are parameters trained as they are."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    extra: tuple[str, ...]
    seed: int


@dataclass(frozen=True)
class Data:
    """Pairs of a better and a worse answer."""

    file: str
    seed: int


@dataclass(frozen=True)
class Loss:
    """Weight of the preference and of the likelihood of the better answer."""

    beta: float
    sft_weight: float


@dataclass(frozen=True)
class Train:
    """Rows of the whole world in one step, rows of one rank in one forward."""

    global_rows: int
    rows_per_step: int
    epochs: int
    lr: float
    weight_decay: float
    warmup: int
    max_norm: float


@dataclass(frozen=True)
class Memory:
    """How the model is held and computed."""

    param_dtype: str = "bfloat16"
    reduce_dtype: str = "float32"
    checkpoint_blocks: bool = True


@dataclass(frozen=True)
class Recipe:
    """All sections, and where things go."""

    base: Base
    adapter: Adapter
    data: Data
    loss: Loss
    train: Train
    memory: Memory
    folder: Path
    output: Path
    save_steps: int
    resume_from: str


def section(kind: type[Section], values: dict[str, Any]) -> Section:
    """One dataclass of a JSON object; lists become tuples. Raises SystemExit with the key that is wrong."""
    known = {item.name for item in fields(kind)}  # type: ignore[arg-type]
    if unknown := set(values) - known:
        raise SystemExit(f"{kind.__name__.lower()}: unknown keys {sorted(unknown)}")
    try:
        return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})
    except TypeError as error:
        raise SystemExit(f"{kind.__name__.lower()}: {error}") from None


def read(argv: list[str] | None = None) -> Recipe:
    """The recipe of a command line."""
    parser = argparse.ArgumentParser(description="Adapt a frozen model to preferences.")
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--save-steps", type=int, default=6)
    parser.add_argument("--resume-from", default="", help="a saved step, or last")
    parser.add_argument("--rows-per-step", type=int)
    options = parser.parse_args(argv)
    raw = json.loads(options.recipe.read_text(encoding="utf-8"))
    train = section(Train, raw["train"])
    if options.rows_per_step:
        train = replace(train, rows_per_step=options.rows_per_step)
    return Recipe(
        base=section(Base, raw["base"]),
        adapter=section(Adapter, raw["adapter"]),
        data=section(Data, raw["data"]),
        loss=section(Loss, raw["loss"]),
        train=train,
        memory=section(Memory, raw.get("memory", {})),
        folder=options.recipe.resolve().parent,
        output=options.output,
        save_steps=options.save_steps,
        resume_from=options.resume_from,
    )
