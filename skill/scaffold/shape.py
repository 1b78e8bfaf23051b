"""What the templates see of the flags of a shape (`operation.shape_flags`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SIZES = {  # of a decoder: the flags of shape.py
    "layers": "blocks",
    "width": "of the residual stream",
    "heads": "of attention",
    "kv_heads": "heads of keys and values",
    "ffn": "hidden size of a feed-forward layer",
    "experts": "routed ones of a layer",
    "top_k": "experts of a token",
    "shared_experts": "those of every token",
    "expert_ffn": "hidden size of an expert",
    "dense_layers": "the first layers, without experts",
    "sequence_length": "tokens of a sample",
    "window": "tokens that a token attends to",
    "full_attention_every": "layers; there it attends to all",
    "rope_theta": "base of the rotary positions",
}


def shape_context(values: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of the shape, and what the mesh and the precision divide of it."""
    model, parallel, flags = values["model"], values["parallel"], values["operation"]["shape_flags"]
    if not flags:
        return {"shape_flags": False}
    experts = model.get("experts")
    absent = {
        "kv_heads": model["kv_heads"] == model["heads"],
        "ffn": bool(experts) and not experts["first_dense"],
        **dict.fromkeys(("experts", "top_k", "expert_ffn"), not experts),
        "shared_experts": not (experts and experts["shared"]),
        "dense_layers": not (experts and experts["first_dense"]),
        "window": not model.get("window"),
        "full_attention_every": not model.get("full_attention_every"),
    }
    sizes = {name: text for name, text in SIZES.items() if not absent.get(name)}
    tp, cp, ep, fp8 = parallel["tp"], parallel["cp"], parallel["ep"], values["precision"]["fp8"]
    multiples = {
        **dict.fromkeys(("heads", "kv_heads", "ffn", "sequence_length"), tp),
        **({"width": 16, "ffn": 16} if fp8 else {}),
        **({"sequence_length": 2 * cp} if cp > 1 else {}),
        "experts": ep,
    }
    wanted = {name: number for name, number in multiples.items() if number > 1 and name in sizes}
    return {"shape_flags": True, "sizes": sizes, "size_multiples": wanted}
