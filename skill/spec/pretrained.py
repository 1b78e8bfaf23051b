"""What a spec check knows of a model of Hugging Face transformers from its files, without the
package.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...verifier.config.reading.document import Document
from .data_content import read_json
from .data_files import absolute

MAX_CONFIG = 1 << 22
MAX_HEADER = 100_000_000  # what safetensors itself allows


def config_file(path: Path) -> Path:
    """The config.json that is meant: the file itself, or that of the folder."""
    return path / "config.json" if path.is_dir() else path


def config_fault(path: Path) -> str:
    """Why this is no config of a model."""
    if not config_file(path).is_file():
        return "has no config.json" if path.is_dir() else "is no file or folder"
    config = read_config(path)
    if config is None:
        return "is no JSON mapping"
    if not isinstance(config.get("model_type"), str):
        return "has no model_type, which names the architecture"
    if "quantization_config" in config:
        return "is a quantized model (quantization_config): its weights cannot be trained"
    return ""


def read_config(path: Path) -> dict[str, Any] | None:
    """The config at `path` (a file or its folder), or None if there is none."""
    found = read_json(config_file(path), MAX_CONFIG)
    return found if isinstance(found, dict) else None


def size(config: dict[str, Any], *names: str) -> int | None:
    """The first of these keys that the config, or that of its language model, holds as a number."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for name in names:
            if isinstance(part.get(name), int):
                return int(part[name])
    return None


def apply(document: Document, base: Path) -> None:
    """Give a transformers model the vocabulary of its config, where the spec has none."""
    model = document.data.get("model") if isinstance(document.data, dict) else None
    if not isinstance(model, dict) or model.get("kind") != "transformers":
        return
    source = model.get("config") or model.get("pretrained")
    if isinstance(source, str):
        source = read_config(Path(absolute(source, base)))
    if isinstance(source, dict) and (found := size(source, "vocab_size")) is not None:
        model.setdefault("vocabulary", found)


def weights_fault(folder: Path) -> str:
    """Why the folder has no weights that can be read."""
    if not folder.is_dir():
        return "is no folder"
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        other = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        return "has no *.safetensors" + (
            " (other formats are not read: use save_pretrained)" if other else ""
        )
    for file in files:
        if not _readable(file):
            return f"has a damaged file: {file.name}"
    index = folder / "model.safetensors.index.json"
    found = read_json(index)
    named = found.get("weight_map", {}) if isinstance(found, dict) else {}
    wanted = named.values() if isinstance(named, dict) else ()
    missing = sorted(
        {name for name in wanted if isinstance(name, str)} - {file.name for file in files}
    )
    return f"lacks {missing[0]}, which model.safetensors.index.json names" if missing else ""


def _readable(file: Path) -> bool:
    """Whether the header is whole and the file as long as it says."""
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 2 <= length <= MAX_HEADER:
            return False
        try:
            header = json.loads(opened.read(length))
            end = max(
                (
                    entry["data_offsets"][1]
                    for key, entry in header.items()
                    if key != "__metadata__"
                ),
                default=0,
            )
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            return False
    return file.stat().st_size == 8 + length + int(end)
