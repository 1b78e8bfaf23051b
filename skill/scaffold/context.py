"""What the templates see: the sections of a spec, and the words and switches that follow from
it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ... import __version__
from ..spec import Spec, pretrained
from ..spec.build import debug_shape
from ..spec.crosschecks_model import CONV1D
from ..spec.crosschecks_reshard import numbers, runs
from ..spec.torch_versions import GROUPED_MM, SET_TIMEOUT, STAGER_SERVES_ONCE, chosen
from ..spec.urls import packages as url_packages
from .data import data_context
from .launch import launch_context

SCHEDULES = {
    "cosine": "a cosine down to MIN_LR_RATIO at schedule_steps",
    "linear": "a straight line down to MIN_LR_RATIO at schedule_steps",
    "wsd": "constant, then a straight line down to MIN_LR_RATIO over decay_steps",
    "constant": "constant",
}
MODELS = {  # kind: (what it is, what model.py holds)
    "decoder": (
        "a decoder-only language model",
        "the decoder, its sharding and its initial weights",
    ),
    "import": ("an imported model", "the imported model and its sharding"),
    "transformers": (
        "a language model of transformers",
        "the model of transformers and its sharding",
    ),
}
ARCHITECTURES = {  # of transformers: model_type and the name of its classes
    "llama": "Llama",
    "qwen3": "Qwen3",
    "mistral": "Mistral",
    "ministral": "Ministral",
    "glm4_moe": "Glm4Moe",
}
INNER = {
    "tp": "tensor parallelism",
    "cp": "context parallelism",
}  # whose ranks read the same samples
# parameters of which no device keeps a whole gradient from one micro-batch to the next
LARGE = 10**9
PACKAGES = {
    "progress": "tqdm",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}  # what a run needs for operation.KEY


def context(spec: Spec) -> dict[str, Any]:
    """The values for the templates."""
    values = spec.to_dict()
    data = data_context(values)
    optimizer, schedule, train = values["optimizer"], values["schedule"], values["train"]
    operation, checkpoint, verify = values["operation"], values["checkpoint"], values["verify"]
    decay, out = optimizer["weight_decay"] > 0, checkpoint["directory"].rstrip("/")
    packages = [package for key, package in PACKAGES.items() if operation[key]]
    suited = [world for world in verify["reshard_to"] if _fits(spec, world)]
    words = ("linear warm-up, then " if schedule["warmup_steps"] else "") + SCHEDULES[
        schedule["kind"]
    ]
    return {
        **values,
        **data,
        **_model(values["model"], values["finetune"]["kind"]),
        "base_bf16": values["finetune"].get("base_dtype") == "bfloat16",
        "base_nf4": values["finetune"].get("base_dtype") == "nf4",
        "mask_parameter": _mask_parameter(values["model"], data["masked"]),
        **_parallel(values["parallel"], values["memory"], values["precision"]),
        **_mesh(spec),
        **launch_context(spec),
        "spec": spec.as_written(),
        "urls": spec.urls,
        "debug": verify["model"] and debug_shape(verify["model"], values["model"]),
        "large": (spec.parameters or 0) >= LARGE,
        "own_modules": spec.own_modules,
        "version": __version__,
        "adamw": optimizer["kind"] == "adamw",
        "adamw8bit": optimizer["kind"] == "adamw8bit",
        "muon": optimizer["kind"] == "muon",
        "schedule_free": optimizer["kind"] == "schedule_free",
        "betas": optimizer["kind"] != "sgd",
        "decay": decay,
        "grouped": decay and optimizer["decay_only_matrices"],
        "groups": {group["match"]: _own_settings(group) for group in optimizer.get("groups", [])},
        "warmup": schedule["warmup_steps"] > 0,
        "schedule_words": words[0].upper() + words[1:] + ".",
        "clip": train["max_norm"] is not None,
        "skip": train["on_nonfinite"] == "skip",
        "every_step": train["log_interval"] == 1,
        "packages": packages,
        "wandb_online": operation["wandb"] == "online",
        "wanted_packages": [
            *["transformers"] * (values["model"]["kind"] == "transformers"),
            *data["data_packages"],
            *url_packages(spec.urls),
            *packages,
            *["matplotlib"] * operation["plot"],
            *["torchao"]
            * (values["precision"]["fp8"] or values["finetune"].get("base_dtype") == "nf4"),
        ],
        "ignored_out": (
            out if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_./-]*", out) and ".." not in out else None
        ),
        "peak_table": operation["mfu"] and operation["peak_tflops"] is None,
        "asynchronous": checkpoint["mode"] != "sync",
        "process": checkpoint["mode"] == "process",
        "grouped_mm": (
            values["precision"]["param_dtype"] == "bfloat16"
            and chosen(values["torch"]) >= GROUPED_MM
        ),
        "set_timeout": chosen(values["torch"]) >= SET_TIMEOUT,
        "stager_serves_once": chosen(values["torch"]) in STAGER_SERVES_ONCE,
        "as_llama": checkpoint["export"] == "huggingface",
        "exported_as": _architecture(values["model"]),
        "exported_words": ARCHITECTURES[_architecture(values["model"])],
        "tied_names": checkpoint["export"] and values["model"]["kind"] == "import",
        "reshard_to": suited,
        "unsuited": [world for world in verify["reshard_to"] if world not in suited],
        "save_step": verify["steps"] // 2 + 1,
    }


def _architecture(model: Mapping[str, Any]) -> str:
    """The architecture of transformers that computes what the decoder does."""
    if model.get("experts"):
        return "glm4_moe"
    if model.get("qk_norm"):
        return "qwen3"
    if model.get("window"):
        return "ministral" if model["full_attention_every"] else "mistral"
    return "llama"


def _mask_parameter(model: Mapping[str, Any], masked: bool) -> str:
    """What the blocks of the decoder get for a mask: some have none where only windows need one."""
    if masked or not model.get("window"):
        return ", mask: Mask" if masked else ""
    return ", mask: Mask | None" if model["full_attention_every"] else ", mask: Mask"


def _own_settings(group: Mapping[str, Any]) -> dict[str, float]:
    """The settings in which a parameter group differs from the optimizer."""
    return {key: group[key] for key in ("lr", "weight_decay") if group[key] is not None}


def _fits(spec: Spec, world: int) -> bool:
    """Whether the mesh of the verification can be built on this many ranks."""
    mesh, shard = spec.verification_mesh, spec["parallel"]["dp_shard"]
    return world == 1 or (
        world % (mesh.dp_replicate * mesh.alike) == 0 if shard == "auto" else world == mesh.ranks
    )


def _mesh(spec: Spec) -> dict[str, Any]:
    """The mesh of training, and that of the verification where it is smaller."""
    sizes = (
        ("dp_replicate", spec["parallel"]["dp_replicate"] > 1),
        ("dp_shard", spec["parallel"]["dp_shard"] != "auto"),
    )
    inner = [(key, spec["parallel"][key] > 1) for key in ("tp", "cp")]
    fixed = [key for key, there in (*sizes, *inner) if there]
    whole = [
        spec["parallel"][key]
        for key in ("dp_replicate", "dp_shard", *(key for key, there in inner if there))
    ]
    return {
        "scaled": spec.scaled,
        "production_words": " x ".join(map(str, whole)),
        "mesh_fields": fixed,
        "mesh_flags": spec.verification_flags,
        "mesh_words": str(spec.verification_mesh),
    }


def _model(model: Mapping[str, Any], tuned: str) -> dict[str, Any]:
    """Where the model comes from, and which part of it is trained."""
    kind, length = model["kind"], model["sequence_length"]
    place, config = model.get("config") or model.get("pretrained"), model.get("config")
    if not isinstance(config, dict):
        config = (pretrained.read_config(Path(place)) if place else None) or {}
    architecture = str(config.get("model_type", ""))
    words, holds = MODELS[kind]
    return {
        "decoder": kind == "decoder",
        "transformers": kind == "transformers",
        "pretrained": model.get("pretrained") is not None,
        "model_type": architecture,
        "model_words": words,
        "model_holds": holds,
        "gqa": kind == "decoder" and model["kv_heads"] != model["heads"],
        "experts": model.get("experts"),
        "balanced": (
            bool(model.get("experts")) and tuned != "lora"
        ),  # which of them a token takes is trained
        "qk_norm": model.get("qk_norm", False),
        "window": model.get("window"),
        "full_every": model.get("full_attention_every"),
        "sequences": length is not None,
        "unit": "sample" if length is None else "token",
        "broadcast": model.get("initialize") == "rank-0",
        "freeze": tuned == "freeze",
        "lora": tuned == "lora",
        "partly": tuned != "full",
        "conv1d": architecture in CONV1D,
        # the frozen weights are in the folder, bit for bit
        "adapters_only": tuned == "lora" and model.get("pretrained") is not None,
    }


def _parallel(
    parallel: Mapping[str, Any], memory: Mapping[str, Any], precision: Mapping[str, Any]
) -> dict[str, Any]:
    """Which steps `parallelize` takes."""
    inner = next((key for key in INNER if parallel[key] > 1), "")
    reshard = parallel["reshard_after_forward"]
    sizes, by_block = numbers(reshard), isinstance(reshard, list)
    ahead = {f"prefetch_{way}": number > 0 for way, number in parallel["prefetch"].items()}
    kind = memory["activation_checkpointing"]
    return {
        **ahead,
        "hsdp": parallel["dp_replicate"] > 1,
        "fixed_shard": parallel["dp_shard"] != "auto",
        "tp": parallel["tp"] > 1,
        "cp": parallel["cp"] > 1,
        "ep": parallel["ep"] > 1,
        "inner": inner,
        "inner_words": INNER.get(inner, ""),
        "reshard_to_ranks": bool(sizes),
        "reshard_sizes": sizes,
        "reshard_runs": runs(reshard) if by_block else [],
        "reshard_given": (
            sum(int(number) for number, _ in runs(reshard) if number != "rest") if by_block else 0
        ),
        "offload": parallel["cpu_offload"],
        "bf16": precision["param_dtype"] == "bfloat16",
        "fp8": precision["fp8"],
        "checkpointing": kind != "none",
        "op_selective": kind == "op-selective",
        "model_settings": (
            bool(sizes) or any(ahead.values()) or kind in ("every-nth", "op-selective")
        ),
        "collect": memory["gc_interval"] is not None,
        "chunked_loss": memory["chunked_loss"],
    }
