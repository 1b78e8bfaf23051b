"""What the templates see of the model: where it comes from, which part of it is trained, and the words for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..spec import pretrained
from ..spec.crosschecks_model import CONV1D

WORDS = {
    "decoder": ("a decoder-only language model", "the decoder, its sharding and its initial weights"),
    "import": ("an imported model", "the imported model and its sharding"),
    "transformers": ("a language model of transformers", "the model of transformers and its sharding"),
}


def model_context(values: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the template context that follows from the sections `model` and `finetune`."""
    model, tuned = values["model"], values["finetune"]["kind"]
    folder = model.get("pretrained") is not None
    architecture = _model_type(model)
    words, holds = WORDS[model["kind"]]
    return {
        "decoder": model["kind"] == "decoder",
        "transformers": model["kind"] == "transformers",
        "pretrained": folder,
        "model_type": architecture,
        "model_words": words,
        "model_holds": holds,
        "freeze": tuned == "freeze",
        "lora": tuned == "lora",
        "partly": tuned != "full",
        "conv1d": architecture in CONV1D,
        "adapters_only": tuned == "lora" and folder,  # the frozen weights are in the folder, bit for bit
    }


def _model_type(model: Mapping[str, Any]) -> str:
    """The architecture of a transformers model; empty for another."""
    config = model.get("config")
    if not isinstance(config, dict):
        place = config or model.get("pretrained")
        config = (pretrained.read_config(Path(place)) if place else None) or {}
    return str(config.get("model_type", ""))
