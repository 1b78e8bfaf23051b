"""The decoder that the scaffold writes as a model of transformers: what the keys of a config.json
say of it, and what of them it cannot compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from . import pretrained
from .data_files import absolute, is_url

KINDS = ("llama", "mistral", "ministral", "qwen3")
NEAR, FAR = "sliding_attention", "full_attention"  # of a layer
NAMES = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocabulary": "vocab_size",
    "tied_embeddings": "tie_word_embeddings",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "qk_norm": "model_type",
    "window": "sliding_window",
    "full_attention_every": "layer_types",
}
OFF = ("window", "full_attention_every")  # keys whose null says something
# what a key means that is left out, in each of these architectures
ABSENT = {"tie_word_embeddings": False, "rope_theta": 10000.0, "rms_norm_eps": 1e-6}


def config_of(source: Any, base: Path) -> Mapping[str, Any]:
    """The config in a spec, or in the file or folder that it names; {} if there is none."""
    if isinstance(source, dict):
        return source
    if not isinstance(source, str) or is_url(source):
        return {}
    return pretrained.read_config(Path(absolute(source, base))) or {}


def decoder_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the model's keys, as far as the config has them."""
    if config.get("model_type") not in KINDS:
        return {}
    types = _layer_types(config)
    near = NEAR in types
    found = {**ABSENT, **config}
    found["sliding_window"] = config.get("sliding_window") if near else None
    found["layer_types"] = types.index(FAR) + 1 if near and FAR in types else None
    found["num_key_value_heads"] = config.get("num_key_value_heads") or config.get(
        "num_attention_heads"
    )
    found["rope_theta"] = _rope(config).get("rope_theta", found["rope_theta"])
    values = {key: found.get(name) for key, name in NAMES.items()}
    values["qk_norm"] = config["model_type"] == "qwen3"
    return {key: value for key, value in values.items() if value is not None or key in OFF}


def strange(config: Mapping[str, Any]) -> Iterator[str]:
    """What the decoder cannot compute of this model, each as a message."""
    if (kind := config.get("model_type")) not in KINDS:
        yield f"is of the architecture {kind!r}; the decoder can be {', '.join(KINDS)}"
        return
    rope = _rope(config)
    if (found := rope.get("rope_type", rope.get("type", "default"))) != "default":
        yield f"scales its rotary positions (rope_type {found!r}), which the decoder does not"
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    size = config.get("head_dim")
    if size and width and heads and size * heads != width:
        yield (
            f"has heads of size {size} (head_dim); those of the decoder are hidden_size {width} /"
            f" num_attention_heads {heads}"
        )
    if (found := config.get("hidden_act", "silu")) != "silu":
        yield f"has the activation {found!r} (hidden_act); that of the decoder is 'silu'"
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            yield f"has biases ({key}), which the decoder has not"
    types = _layer_types(config)
    first = types.index(FAR) + 1 if NEAR in types and FAR in types else 0
    if first and types != [NEAR if n % first else FAR for n in range(1, len(types) + 1)]:
        yield "has windows in other layers than all but each n-th (layer_types)"


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = config.get("rope_parameters") or config.get("rope_scaling")
    return found if isinstance(found, dict) else {}


def _layer_types(config: Mapping[str, Any]) -> list[str]:
    """Of each layer, as transformers reads the config; [] where windows are unknown."""
    if config["model_type"] == "llama":
        return []
    if config.get("layer_types"):
        return [str(kind) for kind in config["layer_types"]]
    wanted = config.get("use_sliding_window", config["model_type"] != "qwen3")
    if not config.get("sliding_window") or not wanted:
        return []
    first = config.get("max_window_layers", 28) if config["model_type"] == "qwen3" else 0
    return [FAR if n < first else NEAR for n in range(config.get("num_hidden_layers", 0))]
