"""The model that a verification trains in place of one that is too large for a laptop."""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm
from typing import Any

from . import schema as spec_schema
from .meshes import verified
from .model import LARGE, decoder_parameters

HEAD_SIZE = 16


def auto_model(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """What `verify.model: auto` means, some sizes still `auto`; None: the model itself.

    `values`: all other keys as numbers. The sizes divide wherever those of the model do.
    """
    model, data = values["model"], values["data"]
    if model["kind"] != "decoder" or decoder_parameters(model) < LARGE:
        return None
    mesh = verified(values["parallel"], values["launch"], values["verify"]["nproc"])
    if mesh is None:
        return None
    small: dict[str, Any] = spec_schema.filled({}, spec_schema.at(("verify", "model")))
    grouped = 2 if model["kv_heads"] != model["heads"] else 1
    heads = lcm(small["heads"], grouped * mesh.tp)
    sizes = {"heads": heads, "ffn": 64 * mesh.tp}
    if data.get("too_long") == "error":  # samples that fit into the model must fit here
        sizes["sequence_length"] = model["sequence_length"]
    return {**small, **sizes, "width": HEAD_SIZE * heads}
