"""The shapes of `model.preset`, those of Llama 3 by size, and of a decoder's `model.config`.

1b: config.json of Llama 3.2 1B; 8b and 70b: those of Llama 3.1 8B and 70B, as in table 3 of "The
Llama 3 Herd of Models" (arXiv 2407.21783) and torchtitan's `llama3` configurations. sequence_length
is that of Llama 3's pre-training; the scaling of rotary positions, by which the published models
read longer texts, is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...verifier.config.reading.document import Document
from . import likeness

LLAMA3 = {"kv_heads": 8, "vocabulary": 128256, "sequence_length": 8192, "rope_theta": 500000.0}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "1b": {
        "layers": 16,
        "width": 2048,
        "heads": 32,
        "ffn": 8192,
        "tied_embeddings": True,
        **LLAMA3,
    },
    "8b": {
        "layers": 32,
        "width": 4096,
        "heads": 32,
        "ffn": 14336,
        "tied_embeddings": False,
        **LLAMA3,
    },
    "70b": {
        "layers": 80,
        "width": 8192,
        "heads": 64,
        "ffn": 28672,
        "tied_embeddings": False,
        **LLAMA3,
    },
}


def apply(document: Document, base: Path) -> None:
    """Give the model of the document the values of its preset or its config, where it has none of
    its own.
    """
    model = document.data.get("model") if isinstance(document.data, dict) else None
    if isinstance(model, dict) and model.get("kind") == "decoder":
        of_config = likeness.decoder_keys(likeness.config_of(model.get("config"), base))
        for key, value in {**of_config, **values_of(model)}.items():
            model.setdefault(key, value)


def values_of(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values that the preset of this model gives; {} without one."""
    preset = model.get("preset")
    return PRESETS.get(preset, {}) if isinstance(preset, str) else {}
