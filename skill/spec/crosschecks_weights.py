"""How the decoder must fit the model of transformers whose shape or weights it takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ...verifier.config.reading.validation import Fault
from . import likeness, pretrained
from .build import ffn_size
from .crosschecks import Values, fault, needs, opens_files, path_of
from .crosschecks_model import LENGTHS


@needs("model.config", "model.kind")
def config_is_of_a_decoder(values: Values, source: Any, kind: str) -> Iterator[Fault]:
    if kind != "decoder" or source is None:
        return
    if values.written("model.preset"):
        yield fault("model.config", "must be left out beside model.preset, which has a shape too")
    if config := likeness.config_of(source, values.base):
        for message in likeness.strange(config):
            yield fault("model.config", message)


@needs("train.init_from", "model.kind", "model.experts", "model.sequence_length")
@opens_files
def weights_are_of_the_decoder(
    values: Values, name: str | None, kind: str, experts: Any, length: int | None
) -> Iterator[Fault]:
    if kind != "decoder" or name is None:
        return
    folder = path_of(values, name)
    if (folder / ".metadata").is_file() or not any(folder.glob("*.safetensors")):
        return
    why = pretrained.weights_fault(folder) or pretrained.config_fault(folder)
    if experts is not None and not why:
        why = "has weights of transformers, which a decoder with model.experts cannot take"
    if why:
        yield fault("train.init_from", f"{why}: {name!r}")
        return
    config = pretrained.read_config(folder) or {}
    for message in likeness.strange(config):
        yield fault("train.init_from", f"{message}: {name!r}")
    for key, theirs in likeness.decoder_keys(config).items():
        if f"model.{key}" in values and (found := _number(values, key)) not in (theirs, "auto"):
            what = f"the {likeness.NAMES[key]} of the model in train.init_from"
            message = f"must be {_yaml(theirs)}, {what}, found {_yaml(found)}"
            yield fault(f"model.{key}", message)
    longest = pretrained.size(config, *LENGTHS)
    if longest is not None and length is not None and length > longest:
        message = f"must be at most {longest}, the positions of the model in train.init_from"
        yield fault("model.sequence_length", f"{message}, found {length}")


def _number(values: Values, key: str) -> Any:
    """The value of a key of the model, `auto` as what it means where that is known."""
    value = values[f"model.{key}"]
    if value == "auto" and key == "kv_heads" and "model.heads" in values:
        return values["model.heads"]
    if value == "auto" and key == "ffn" and "model.width" in values:
        return ffn_size(values["model.width"])
    return value


def _yaml(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
