"""From valid data to the Spec: defaults are already in it; numbers, paths and derived values are settled here."""

from __future__ import annotations

import keyword
from copy import deepcopy
from pathlib import Path
from typing import Any

from ...verifier.reading.problems import KeyPath
from . import data_files, model
from . import schema as spec_schema

SECTIONS: dict[tuple[str, str | None], type[model.Section]] = {
    ("model", "decoder"): model.DecoderModel,
    ("model", "import"): model.ImportModel,
    ("model", "transformers"): model.TransformersModel,
    ("data", "text"): model.TextData,
    ("data", "tokens"): model.TokenData,
    ("data", "jsonl"): model.JsonlData,
    ("data", "datasets"): model.SavedDataset,
    ("data", "images"): model.ImageData,
    ("data", "import"): model.ImportData,
    ("data", "synthetic"): model.SyntheticData,
    ("finetune", "full"): model.FullTuning,
    ("finetune", "freeze"): model.Freezing,
    ("finetune", "lora"): model.LoRA,
    ("parallel", None): model.Parallel,
    ("precision", None): model.Precision,
    ("memory", None): model.Memory,
    ("optimizer", "adamw"): model.AdamW,
    ("optimizer", "sgd"): model.SGD,
    ("schedule", "cosine"): model.Curve,
    ("schedule", "linear"): model.Curve,
    ("schedule", "wsd"): model.WarmupStableDecay,
    ("schedule", "constant"): model.Constant,
    ("train", None): model.Train,
    ("checkpoint", None): model.Checkpoint,
    ("operation", None): model.Operation,
    ("verify", None): model.Verify,
    ("launch", None): model.Launch,
}

NESTED: dict[KeyPath, type[model.Section]] = {
    ("optimizer", "groups"): model.Group,
    ("parallel", "prefetch"): model.Prefetch,
}
PATHS = (("data", "folder"), ("data", "tokenizer"), ("model", "config"), ("model", "pretrained"))


def build(filled: dict[str, Any], base: Path) -> model.Spec:
    """The Spec of valid data with its defaults filled in. Relative data files start at `base`."""
    auto = frozenset(
        (name, key)
        for name, section in filled.items()
        if isinstance(section, dict)
        for key, value in section.items()
        if value == "auto"
    )
    if filled["schedule"].get("decay_steps") == "auto":
        filled["schedule"]["decay_steps"] = wsd_decay_steps(filled["train"]["steps"])
    if not filled["launch"]["engines"]:
        filled["launch"] = spec_schema.filled({}, spec_schema.at(("launch",)))
    return model.Spec(**{key: _value((key,), value, base) for key, value in filled.items()}, auto=auto)


def _value(path: KeyPath, value: Any, base: Path) -> Any:
    schema = spec_schema.at(path) or {}
    if path == ("data", "files"):
        return tuple(data_files.absolute(pattern, base) for pattern in value)
    if path in PATHS and isinstance(value, str):
        return data_files.absolute(value, base)
    if isinstance(value, dict) and "properties" in schema:
        values = {key: _value((*path, key), item, base) for key, item in value.items()}
        nested = NESTED.get(path[:2])
        return nested(**values) if nested else _section(str(path[0]), values)
    if isinstance(value, dict):
        return deepcopy(value)
    if isinstance(value, list):
        return tuple(_value((*path, number), item, base) for number, item in enumerate(value))
    types = schema.get("type", [])
    is_number = "number" in ([types] if isinstance(types, str) else types)
    return float(value) if is_number and value is not None else value


def _section(name: str, values: dict[str, Any]) -> model.Section:
    if name == "model" and values["kind"] == "decoder":
        if values["kv_heads"] == "auto":
            values["kv_heads"] = values["heads"]
        if values["ffn"] == "auto":
            values["ffn"] = ffn_size(values["width"])
    record = SECTIONS.get((name, values.get("kind"))) or SECTIONS[name, None]
    return record(**{key + "_" * keyword.iskeyword(key): value for key, value in values.items()})


def wsd_decay_steps(steps: int) -> int:
    """A tenth of the steps, at least one."""
    return max(1, steps // 10)


def ffn_size(width: int) -> int:
    """8/3 of the width, rounded up to a multiple of 32."""
    return -(-8 * width // 96) * 32
