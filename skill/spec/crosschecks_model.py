"""How a transformers model, and what of a model is trained, must fit together with the files and
the other keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ...verifier.config.reading.validation import Fault
from . import pretrained
from .crosschecks import Values, fault, needs, opens_files, path_of
from .data_files import is_url
from .torch_versions import FROZEN_IN_ITS_OWN_TYPE, chosen

LENGTHS = ("max_position_embeddings", "n_positions")
CONV1D = ("gpt2", "openai-gpt", "imagegpt")  # their linear layers are transformers' own Conv1D
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@needs("model.config", "model.pretrained")
def one_source(values: Values, config: Any, folder: str | None) -> Iterator[Fault]:
    if config is None and folder is None:
        yield Fault(
            ("model", "config"),
            "missing key 'config' or 'pretrained' in model",
            ("model",),
            on_key=True,
        )
    elif config is not None and folder is not None:
        yield fault(
            "model.config", "must be left out beside model.pretrained, whose folder has a config"
        )


@needs("model.config")
def config_is_valid(values: Values, config: Any) -> Iterator[Fault]:
    if isinstance(config, str):
        if not is_url(config) and (message := pretrained.config_fault(path_of(values, config))):
            yield fault("model.config", f"{message}: {config!r}")
    elif config is not None:
        for key, why in (
            ("model_type", "names the architecture"),
            ("vocab_size", "is not the same in all models"),
        ):
            if not isinstance(config.get(key), str if key == "model_type" else int):
                yield fault("model.config", f"must have {key}, which {why}")


@needs("model.pretrained")
@opens_files
def folder_has_weights(values: Values, folder: str | None) -> Iterator[Fault]:
    if folder is not None:
        path = path_of(values, folder)
        if message := pretrained.weights_fault(path) or pretrained.config_fault(path):
            yield fault("model.pretrained", f"{message}: {folder!r}")
        elif (pretrained.size(pretrained.read_config(path) or {}, *EXPERTS) or 0) > 1:
            message = (
                "is a mixture of experts, which transformers stores under other names than it has"
                " them"
            )
            yield fault(
                "model.pretrained", f"{message}; only `config` can be given for it: {folder!r}"
            )


@needs("model.pretrained", "finetune.targets")
def adapters_need_the_architecture(
    values: Values, folder: str | None, targets: list[str]
) -> Iterator[Fault]:
    """Without its files, only the config says of which class the layers are that get adapters."""
    if not values.offline or folder is None or is_url(folder):
        return
    if why := pretrained.config_fault(path_of(values, folder)):
        message = (
            f"{why}: {folder!r}; for finetune.kind lora --offline needs its config.json (not the"
            " weights)"
        )
        yield fault("model.pretrained", message)


@needs("model.config", "model.pretrained", "model.vocabulary", "model.sequence_length")
def sizes_fit_the_config(
    values: Values, source: Any, folder: Any, ids: int, found: int | None
) -> Iterator[Fault]:
    """Only sizes in the config: some configs leave out the defaults of their architecture."""
    config = _config(values, source or folder)
    vocabulary, length = pretrained.size(config, "vocab_size"), pretrained.size(config, *LENGTHS)
    if vocabulary is not None and vocabulary != ids:
        message = f"must be {vocabulary}, the vocab_size of the model, found {ids}"
        yield fault("model.vocabulary", message)
    if length is not None and found is not None and found > length:
        yield fault(
            "model.sequence_length",
            f"must be at most {length}, the positions of the model, found {found}",
        )


@needs("model.config", "model.pretrained", "parallel.tp")
def transformers_divide(values: Values, source: Any, folder: Any, tp: int) -> Iterator[Fault]:
    config = _config(values, source or folder)
    if tp > 1 and config.get("model_type") in CONV1D:
        message = (
            f"must be 1 for {config['model_type']}, for which transformers has no plan, found {tp}"
        )
        yield fault("parallel.tp", message)
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        number = pretrained.size(config, key)
        if number is not None and number % tp:
            yield fault("parallel.tp", f"must divide {key} {number} of the model, found {tp}")
            return


@needs("model.kind", "parallel.tp", "precision.fp8", "finetune.targets")
def adapters_are_not_split(
    values: Values, kind: str, tp: int, fp8: bool, targets: list[str]
) -> Iterator[Fault]:
    if tp > 1 and kind != "decoder":
        message = f"must be 1 for finetune.kind lora with model.kind {kind}, found {tp}"
        yield fault("parallel.tp", message)
    if fp8:
        message = "must be false for finetune.kind lora: torchao 0.18 replaces layers with adapters"
        yield fault("precision.fp8", f"{message} by its own, which have none")


@needs("finetune.base_dtype", "precision.param_dtype", "torch")
def frozen_base_is_computed_with(
    values: Values, base: str, dtype: str, torch: str | None
) -> Iterator[Fault]:
    if base != "float32" and dtype != "bfloat16":
        message = (
            f"{base} needs precision.param_dtype: bfloat16, in which adapters and base meet, found"
            f" {dtype!r}"
        )
        yield fault("finetune.base_dtype", message)
    elif base != "float32" and (found := chosen(torch)) < FROZEN_IN_ITS_OWN_TYPE:
        least, version = (".".join(map(str, one)) for one in (FROZEN_IN_ITS_OWN_TYPE, found))
        yield fault(
            "finetune.base_dtype",
            f"{base} needs torch {least} or later; the project is for torch {version}",
        )


@needs("finetune.base_dtype", "model.kind")
def four_bits_are_of_files(values: Values, base: str, kind: str) -> Iterator[Fault]:
    if base == "nf4" and (kind != "transformers" or values["model.pretrained"] is None):
        yield fault(
            "finetune.base_dtype",
            "nf4 needs model.kind: transformers and model.pretrained, whose weights are rounded",
        )
    elif base == "nf4" and _config(values, values["model.pretrained"]).get("model_type") in CONV1D:
        yield fault(
            "finetune.base_dtype",
            "nf4 needs nn.Linear; the layers of this model are transformers' own Conv1D",
        )


@needs("finetune.base_dtype", "parallel.cpu_offload", "memory.compile")
def four_bits_alone(values: Values, base: str, offload: bool, compiled: bool) -> Iterator[Fault]:
    for key, found in (("parallel.cpu_offload", offload), ("memory.compile", compiled)):
        if base == "nf4" and found:
            yield fault(key, "must be false for finetune.base_dtype nf4")


@needs("finetune.train")
def trained_are_patterns(values: Values, patterns: list[str]) -> Iterator[Fault]:
    for number, pattern in enumerate(patterns):
        try:
            found = re.compile(pattern)
        except re.error as error:
            yield fault("finetune.train", f"is not a regular expression: {error}", number)
        else:
            names = _decoder_parameters(values)
            if names and not any(map(found.search, names)):
                yield fault("finetune.train", f"matches no parameter, found {pattern!r}", number)


@needs("finetune.targets")
def targets_are_layers(values: Values, targets: list[str]) -> Iterator[Fault]:
    layers = [
        name.removesuffix(".weight")
        for name in _decoder_parameters(values)
        if name.endswith(".weight")
    ]
    linear = [name for name in layers if "norm" not in name and name != "embedding"]
    for number, target in enumerate(targets):
        if linear and not any(f".{name}".endswith(f".{target}") for name in linear):
            known = dict.fromkeys(name.rpartition(".")[2] for name in linear)
            yield fault(
                "finetune.targets", f"must be of {', '.join(known)}, found {target!r}", number
            )


@needs("checkpoint.export", "model.kind")
def export_knows_the_names(values: Values, export: Any, kind: str) -> Iterator[Fault]:
    if export == "huggingface" and kind != "decoder":
        yield fault(
            "checkpoint.export", f"must be true or false for model.kind {kind}, found 'huggingface'"
        )


@needs("checkpoint.generate", "model.kind")
def generate_knows_the_model(values: Values, generate: bool, kind: str) -> Iterator[Fault]:
    if generate and kind != "decoder":
        why = (
            "transformers has `generate` for it"
            if kind == "transformers"
            else "its inputs are your own"
        )
        yield fault("checkpoint.generate", f"must be false for model.kind {kind}: {why}")


def _decoder_parameters(values: Values) -> list[str]:
    """The names of the parameters of the decoder that the scaffold writes; none for another
    model.
    """
    if not all(
        f"model.{key}" in values for key in ("layers", "tied_embeddings", "qk_norm", "experts")
    ):
        return []
    parts = [f"attention.{name}" for name in ("query", "key", "value", "output")]
    if values["model.qk_norm"]:
        parts += ["attention.query_norm", "attention.key_norm"]
    parts = [f"{part}.weight" for part in (*parts, "attention_norm", "feed_forward_norm")]
    layers, experts = values["model.layers"], values["model.experts"]
    dense = [f"feed_forward.{name}.weight" for name in ("gate", "up", "down")]
    mixture = [
        f"experts.{name}" for name in ("router", "stacked.gate", "stacked.up", "stacked.down")
    ]
    mixture += [
        f"shared_experts.{name}.weight"
        for name in ("gate", "up", "down")
        if experts and experts["shared"]
    ]
    first = experts["first_dense"] if experts else layers
    names = [
        f"blocks.{n}.{part}"
        for n in range(layers)
        for part in (*parts, *(dense if n < first else mixture))
    ]
    ends = ("embedding", "norm") + (() if values["model.tied_embeddings"] else ("head",))
    return [*names, *(f"{end}.weight" for end in ends)]


def _config(values: Values, source: Any) -> dict[str, Any]:
    """The config of a model: written in the spec, or in a file or folder; {} if there is none."""
    if isinstance(source, dict):
        return source
    return (pretrained.read_config(path_of(values, source)) if source else None) or {}
