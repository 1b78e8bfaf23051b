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
# whose ranks read the same samples
INNER = {"tp": "tensor parallelism", "cp": "context parallelism"}
# parameters of which no device keeps a whole gradient from one micro-batch to the next
LARGE = 10**9
# what a run needs for operation.KEY
PACKAGES = {"progress": "tqdm", "tensorboard": "tensorboard", "wandb": "wandb"}


def context(spec: Spec) -> dict[str, Any]:
    """The values for the templates."""
    values = spec.to_dict()
    model, train, operation = values["model"], values["train"], values["operation"]
    data = data_context(values)
    return {
        **values,
        **data,
        **_model(model, values["finetune"]),
        "mask_parameter": _mask_parameter(model, data["masked"]),
        **_parallel(values["parallel"], values["memory"], values["precision"]),
        **_mesh(spec),
        **_optimizer(values["optimizer"], values["schedule"]),
        **_checkpoint(values["checkpoint"], model),
        **_verification(spec),
        **_packages(values, data["data_packages"], spec.urls, reads_llama(spec)),
        **_torch(chosen(values["torch"]), values["precision"]),
        **launch_context(spec),
        "spec": spec.as_written(),
        "reads_llama": reads_llama(spec),
        "urls": spec.urls,
        "large": (spec.parameters or 0) >= LARGE,
        "own_modules": spec.own_modules,
        "version": __version__,
        "ends": _ends_alone(values["model"], values["parallel"]),
        "clip": train["max_norm"] is not None,
        "skip": train["on_nonfinite"] == "skip",
        "every_step": train["log_interval"] == 1,
        "wandb_online": operation["wandb"] == "online",
        "peak_table": operation["mfu"] and operation["peak_tflops"] is None,
    }


def _optimizer(optimizer: Mapping[str, Any], schedule: Mapping[str, Any]) -> dict[str, Any]:
    """Which optimizer takes the steps, its parameter groups, and the learning rate in words."""
    kind, decay = optimizer["kind"], optimizer["weight_decay"] > 0
    words = SCHEDULES[schedule["kind"]]
    if schedule["warmup_steps"]:
        words = "linear warm-up, then " + words
    return {
        **{one: kind == one for one in ("adamw", "adamw8bit", "muon", "schedule_free")},
        "found_inf_unread": kind != "adamw",  # only torch's fused ones leave out an update
        "betas": kind != "sgd",
        "decay": decay,
        "grouped": decay and optimizer["decay_only_matrices"],
        "groups": {group["match"]: _own_settings(group) for group in optimizer.get("groups", [])},
        "warmup": schedule["warmup_steps"] > 0,
        "schedule_words": words[0].upper() + words[1:] + ".",
    }


def _own_settings(group: Mapping[str, Any]) -> dict[str, float]:
    """The settings in which a parameter group differs from the optimizer."""
    return {key: group[key] for key in ("lr", "weight_decay") if group[key] is not None}


def _checkpoint(checkpoint: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """How checkpoints are written, what they are exported as, and what git ignores of them."""
    out, architecture = checkpoint["directory"].rstrip("/"), _architecture(model)
    plain = re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_./-]*", out) and ".." not in out
    return {
        "ignored_out": out if plain else None,
        "asynchronous": checkpoint["mode"] != "sync",
        "process": checkpoint["mode"] == "process",
        "as_llama": checkpoint["export"] == "huggingface",
        "exported_as": architecture,
        "exported_words": ARCHITECTURES[architecture],
        "tied_names": checkpoint["export"] and model["kind"] == "import",
    }


def reads_llama(spec: Spec) -> bool:
    """Whether the decoder can start with weights of transformers, whose experts are not stacked."""
    model = spec["model"]
    return (
        model["kind"] == "decoder"
        and not model["experts"]
        and spec["train"]["init_from"] is not None
    )


def _verification(spec: Spec) -> dict[str, Any]:
    """What `fsdp2 verify` runs: the smaller model, the step that is saved, the other ranks."""
    verify = spec["verify"]
    suited = [world for world in verify["reshard_to"] if _fits(spec, world)]
    accumulates = spec.gradient_accumulation_steps(verify["nproc"]) > 1
    low = spec["precision"]["param_dtype"] != "float32"
    required = {
        "checkpoint": True,
        "resume": True,
        "reshard": bool(suited),
        "accumulation": accumulates,
        "bf16": low,
    }
    return {
        "required": [part for part, does in required.items() if does],
        "debug": verify["model"] and debug_shape(verify["model"], spec["model"]),
        "reshard_to": suited,
        "unsuited": [world for world in verify["reshard_to"] if world not in suited],
        "save_step": verify["steps"] // 2 + 1,
    }


def _packages(
    values: Mapping[str, Any], of_data: list[str], urls: list[str], reads: bool
) -> dict[str, Any]:
    """The packages that the project needs beside torch."""
    operation = values["operation"]
    packages = [package for key, package in PACKAGES.items() if operation[key]]
    torchao = values["precision"]["fp8"] or values["finetune"].get("base_dtype") == "nf4"
    return {
        "packages": packages,
        "wanted_packages": [
            *["transformers"] * (values["model"]["kind"] == "transformers"),
            *of_data,
            *url_packages(urls),
            *packages,
            *["verified-fsdp2"] * operation["guard"],
            *["torchao"] * torchao,
            *["safetensors"] * reads,
        ],
    }


def _torch(version: tuple[int, int], precision: Mapping[str, Any]) -> dict[str, bool]:
    """What this version of torch has."""
    return {
        "grouped_mm": precision["param_dtype"] == "bfloat16" and version >= GROUPED_MM,
        "set_timeout": version >= SET_TIMEOUT,
        "stager_serves_once": version in STAGER_SERVES_ONCE,
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
    if masked:
        return ", mask: Mask"
    if not model.get("window"):
        return ""
    return ", mask: Mask | None" if model["full_attention_every"] else ", mask: Mask"


def _fits(spec: Spec, world: int) -> bool:
    """Whether the mesh of the verification can be built on this many ranks."""
    mesh = spec.verification_mesh
    if spec["parallel"]["dp_shard"] == "auto":
        return world == 1 or world % (mesh.dp_replicate * mesh.alike) == 0
    return world in (1, mesh.ranks)


def _mesh(spec: Spec) -> dict[str, Any]:
    """The mesh of training, and that of the verification where it is smaller."""
    parallel = spec["parallel"]
    inner = [key for key in ("tp", "cp") if parallel[key] > 1]
    fixed = ["dp_replicate"] * (parallel["dp_replicate"] > 1)
    fixed += ["dp_shard"] * (parallel["dp_shard"] != "auto")
    sizes = [str(parallel[key]) for key in ("dp_replicate", "dp_shard", *inner)]
    return {
        "scaled": spec.scaled,
        "production_words": " x ".join(sizes),
        "mesh_fields": fixed + inner,
        "mesh_flags": spec.verification_flags,
        "mesh_words": str(spec.verification_mesh),
    }


def _model(model: Mapping[str, Any], finetune: Mapping[str, Any]) -> dict[str, Any]:
    """Where the model comes from, and which part of it is trained."""
    tuned, base = finetune["kind"], finetune.get("base_dtype")
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
        # which of them a token takes is trained
        "balanced": bool(model.get("experts")) and tuned != "lora",
        "qk_norm": model.get("qk_norm", False),
        "window": model.get("window"),
        "full_every": model.get("full_attention_every"),
        "sequences": length is not None,
        "unit": "sample" if length is None else "token",
        "broadcast": model.get("initialize") == "rank-0",
        "freeze": tuned == "freeze",
        "lora": tuned == "lora",
        "partly": tuned != "full",
        "base_bf16": base == "bfloat16",
        "base_nf4": base == "nf4",
        "conv1d": architecture in CONV1D,
        # the frozen weights are in the folder, bit for bit
        "adapters_only": tuned == "lora" and model.get("pretrained") is not None,
    }


def _ends_alone(model: Mapping[str, Any], parallel: Mapping[str, Any]) -> bool:
    """Whether the embedding and the head of a decoder are groups of FSDP: tied ones are one
    parameter, with tensor parallelism the loss reads the head's weight itself, and what is
    offloaded is not overlapped.
    """
    untied = model["kind"] == "decoder" and not model["tied_embeddings"]
    return untied and parallel["tp"] == 1 and not parallel["cpu_offload"]


def _parallel(
    parallel: Mapping[str, Any], memory: Mapping[str, Any], precision: Mapping[str, Any]
) -> dict[str, Any]:
    """Which steps `parallelize` takes."""
    inner = next((key for key in INNER if parallel[key] > 1), "")
    reshard = parallel["reshard_after_forward"]
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
        "reshard_to_ranks": not isinstance(reshard, bool),
        "offload": parallel["cpu_offload"],
        "bf16": precision["param_dtype"] == "bfloat16",
        "fp8": precision["fp8"],
        "checkpointing": kind != "none",
        "op_selective": kind == "op-selective",
        "compile_inside": memory["compile"] and inner == "tp" and kind == "full",
        "model_settings": (
            not isinstance(reshard, bool) or any(ahead.values()) or kind == "op-selective"
        ),
        "collect": memory["gc_interval"] is not None,
        "chunked_loss": memory["chunked_loss"],
    }
