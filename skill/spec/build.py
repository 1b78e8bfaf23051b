"""From valid data to the Spec: defaults are already in it; numbers, paths and derived values are
set here.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from ...verifier.config.reading.problems import KeyPath
from . import data_files
from . import schema as spec_schema
from .meshes import verified
from .model import Spec

PATHS = {("data", key) for key in ("files", "folder", "tokenizer", "validation")}
PATHS |= {("model", "config"), ("model", "pretrained"), ("train", "init_from")}
IMAGE_WORKERS = 4  # processes that decode, on each rank


def build(filled: dict[str, Any], base: Path) -> Spec:
    """The Spec of valid data with its defaults filled in. Relative data files start at `base`."""
    auto = frozenset(
        (name, key)
        for name, section in filled.items()
        if isinstance(section, dict)
        for key, value in section.items()
        if value == "auto"
    )
    values = {key: _value((key,), value, base) for key, value in filled.items()}
    if not values["launch"]["engines"]:
        values["launch"] = spec_schema.filled({}, spec_schema.at(("launch",)))
    model, schedule, data = values["model"], values["schedule"], values["data"]
    if model["kind"] == "decoder":
        model["config"] = None  # its keys have the values
    if schedule.get("decay_steps") == "auto":
        schedule["decay_steps"] = wsd_decay_steps(values["train"]["steps"])
    if data["workers"] == "auto":
        data["workers"] = (
            IMAGE_WORKERS
            if data["kind"] == "images" and values["launch"]["device"] == "cuda"
            else 0
        )
    if data["kind"] == "chat" and data["packing"] is True:
        data["packing"] = "documents"
    if model.get("kv_heads") == "auto":
        model["kv_heads"] = model["heads"]
    if model.get("ffn") == "auto":
        model["ffn"] = ffn_size(model["width"])
    if model.get("experts"):
        model["experts"] = sized_experts(model["experts"], model["ffn"])
    values["parallel"]["prefetch"] = _prefetched(values["parallel"])
    if values["verify"]["nproc"] == "auto" and (
        mesh := verified(values["parallel"], values["launch"], "auto")
    ):
        values["verify"]["nproc"] = mesh.ranks
    if values["verify"]["model"] is not None:
        values["verify"]["model"] = debug_model(values["verify"]["model"], model)
    return Spec(values, auto)


def _value(path: KeyPath, value: Any, base: Path) -> Any:
    schema = spec_schema.at(path) or {}
    if isinstance(value, dict) and "properties" in schema:
        return {key: _value((*path, key), item, base) for key, item in value.items()}
    if isinstance(value, list):
        return [_value((*path, number), item, base) for number, item in enumerate(value)]
    if isinstance(value, dict) and path == ("data", "validation"):
        return {name: _value((*path, name), files, base) for name, files in value.items()}
    if isinstance(value, str) and (
        path[:2] in PATHS or (path[:2] == ("data", "mixture") and "files" in path)
    ):
        return data_files.absolute(value, base)
    is_number = "number" in schema.get("type", ()) and value is not None
    return float(value) if is_number else deepcopy(value)


def _prefetched(parallel: Mapping[str, Any]) -> dict[str, int]:
    """With expert parallelism, whose host waits in each layer, one block is gathered ahead."""
    apart = parallel["ep"] > 1
    own = {
        "forward": int(apart),
        "backward": int(apart and parallel["reshard_after_forward"] is not False),
    }
    return {way: own[way] if n == "auto" else n for way, n in parallel["prefetch"].items()}


def wsd_decay_steps(steps: int) -> int:
    """A tenth of the steps, at least one."""
    return max(1, steps // 10)


def debug_model(small: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of the model of a verification, every `auto` a number; those of `model` are
    numbers.
    """
    heads, grouped = small["heads"], model["kv_heads"] != model["heads"]
    derived = {
        "kv_heads": max(1, heads // 2) if grouped else heads,
        "ffn": ffn_size(small["width"]),
        "vocabulary": model["vocabulary"],
        "sequence_length": min(128, model["sequence_length"]),
    }
    return {key: derived[key] if value == "auto" else value for key, value in small.items()}


def debug_shape(small: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """The whole shape of the model of a verification: a window is one for its shorter samples
    too.
    """
    shape = {**model, **small}
    if model.get("experts"):
        shape["experts"] = debug_experts(small, model)
    if model.get("window"):
        shape["window"] = min(model["window"], max(1, small["sequence_length"] // 2))
    if model.get("full_attention_every"):
        shape["full_attention_every"] = max(2, min(model["full_attention_every"], small["layers"]))
    return shape


def debug_experts(small: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """As many experts in the model of a verification, of a size that suits it; at least one layer
    has them.
    """
    experts = model["experts"]
    dense = min(experts["first_dense"], small["layers"] - 1)
    return sized_experts({**experts, "ffn": "auto", "first_dense": dense}, small["ffn"])


def sized_experts(experts: Mapping[str, Any], ffn: int) -> dict[str, Any]:
    """With `auto` as a number: those of a token are together about as wide as a dense layer of this
    hidden size.
    """
    together = experts["top_k"] + experts["shared"]
    size = -(-ffn // (32 * together)) * 32 if experts["ffn"] == "auto" else experts["ffn"]
    return {**experts, "ffn": size}


def ffn_size(width: int) -> int:
    """8/3 of the width, rounded up to a multiple of 32."""
    return -(-8 * width // 96) * 32
