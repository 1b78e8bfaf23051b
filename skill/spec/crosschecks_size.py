"""Checks of sizes: whether the devices hold the training state, and the small model of a
verification.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...verifier.config.devices import GIB, Device, named, table
from ...verifier.config.reading.validation import Fault
from ...verifier.config.reading.words import similar
from .build import debug_model, debug_shape, ffn_size, sized_experts
from .crosschecks import Values, counts_ranks, fault, needs
from .crosschecks_parallel import TP_SIZES, verification_mesh
from .meshes import production
from .model import decoder_parameters

# of a parameter: float32 weight, gradient, and Adam's two moments (of 32 or 8 bits) or one momentum
BYTES = {"adamw": 16, "adamw8bit": 10, "sgd": 12, "muon": 12, "schedule_free": 16}
BLOCK = 64  # numbers that share a scale in moments of 8 bits
MEAN_BYTES = 4  # of a parameter, with optimizer.average_decay: its mean in float32
SHAPE = (
    "layers",
    "width",
    "heads",
    "kv_heads",
    "ffn",
    "experts",
    "qk_norm",
    "vocabulary",
    "tied_embeddings",
)


@needs(*(f"model.{key}" for key in SHAPE), "parallel", "launch", "optimizer.kind")
@counts_ranks
def devices_hold_the_state(values: Values, *inputs: Any) -> Iterator[Fault]:
    """Weights, gradients and optimizer state alone; activations and gathered blocks come on top."""
    optimizer, launch, parallel = inputs[-1], values["launch"], values["parallel"]
    memory, mesh = device_memory(launch), production(parallel, launch)
    trains_all = "finetune" in values and values["finetune"]["kind"] == "full"
    if memory is None or mesh is None or parallel["cpu_offload"] or not trains_all:
        return
    count, ranks = decoder_parameters(_sizes(values["model"])), mesh.dp_shard * mesh.alike
    size, parts = BYTES[optimizer], f"weight, gradient, {optimizer}"
    if "optimizer.average_decay" in values and values["optimizer.average_decay"] is not None:
        size, parts = size + MEAN_BYTES, f"{parts}, mean"
    needed = count * size / ranks / GIB
    if needed > memory:
        state = f"{count:,} parameters x {size} bytes ({parts})"
        least = -(-count * size // int(memory * GIB))
        message = (
            f"on the mesh {mesh}: {state} / {ranks} ranks of a copy = {needed:.1f} GiB, a device"
            f" has {memory:.4g}"
        )
        key = "parallel.dp_shard" if values.written("parallel.dp_shard") else "launch.nodes"
        yield fault(key, f"is too small {message}; shard over {least} ranks or more")


def device_memory(launch: Mapping[str, Any]) -> float | None:
    """GiB of a device, if the section says or names it."""
    if launch["engines"] and launch["device"] == "cuda" and launch["device_memory"]:
        return float(launch["device_memory"])
    known = device_of(launch)
    return None if known is None else known.memory / GIB


def device_of(launch: Mapping[str, Any]) -> Device | None:
    """The GPU that the section names, if it is known."""
    if not launch["engines"] or launch["device"] != "cuda":
        return None
    return named(launch["gpu"] or launch["skypilot_accelerator"] or "")


@needs("launch.gpu", "launch.device", "launch.engines")
def gpu_is_known(
    values: Values, gpu: str | None, device: str, engines: list[str]
) -> Iterator[Fault]:
    if gpu is None or not engines:
        return
    if device != "cuda":
        yield fault("launch.gpu", f"does nothing with launch.device: {device}", on_key=True)
    elif named(gpu) is None:
        match = similar(gpu.lower(), list(table()))
        meant = f"; did you mean {match!r}?" if match else ""
        message = f"is no GPU of the table: {gpu!r}{meant} (known: {', '.join(table())})"
        yield fault("launch.gpu", f"{message}; another one by launch.device_memory")


@needs("verify.model", "model.kind")
def only_a_decoder_is_made_smaller(values: Values, small: Any, kind: str) -> Iterator[Fault]:
    if small not in (None, "auto") and kind != "decoder":
        yield fault(
            "verify.model",
            f"needs model.kind: decoder (another sizes its layers itself), found {kind}",
        )


@needs("verify.model", *(f"model.{key}" for key in SHAPE), "model.sequence_length")
def small_model_is_whole(values: Values, small: Any, *shape: Any) -> Iterator[Fault]:
    if small in (None, "auto"):
        return
    whole = _sizes(values["model"])
    sizes = debug_model(small, whole)
    width, heads, kv_heads = sizes["width"], sizes["heads"], sizes["kv_heads"]
    grouped = whole["kv_heads"] != whole["heads"]
    if width % heads or width // heads % 2:
        yield fault(
            "verify.model", f"must divide width {width} into even sizes, found {heads}", "heads"
        )
    elif heads % kv_heads:
        yield fault("verify.model", f"must divide heads {heads}, found {kv_heads}", "kv_heads")
    elif not grouped and kv_heads != heads:
        yield fault(
            "verify.model", f"must be heads {heads}, as in the model, found {kv_heads}", "kv_heads"
        )
    mesh = verification_mesh(values)
    if mesh is not None and mesh.cp > 1 and (length := sizes["sequence_length"]) % (2 * mesh.cp):
        message = f"must be a multiple of 2 x cp {mesh.cp} of the mesh {mesh}, found {length}"
        yield fault("verify.model", message, "sequence_length")
    for key in TP_SIZES if mesh is not None else ():
        if mesh is not None and sizes[key] % mesh.tp:
            yield fault(
                "verify.model",
                f"must be a multiple of tp {mesh.tp} of the mesh {mesh}, found {sizes[key]}",
                key,
            )


@needs("parallel.tp", "optimizer.kind", "verify.model", *(f"model.{key}" for key in SHAPE))
def columns_divide(
    values: Values, tp: int, optimizer: str, small: Any, *shape: Any
) -> Iterator[Fault]:
    """Tensor parallelism splits the columns of attention's output and of `down`."""
    whole, mesh = _sizes(values["model"]), verification_mesh(values)
    shapes = [("model", whole, tp)]
    if small not in (None, "auto") and mesh is not None:
        shapes.append(("verify.model", debug_shape(debug_model(small, whole), whole), mesh.tp))
    for where, sizes, parts in shapes:
        for name, size in _columns(sizes).items():
            if "experts" in name and size % parts:
                yield fault("parallel.tp", f"must divide {where}.{name} {size}, found {parts}")
            elif optimizer == "adamw8bit" and size % BLOCK == 0 and size // parts % BLOCK:
                message = (
                    f"must be 1 for optimizer.kind adamw8bit, or {where}.{name} a multiple of"
                    f" {BLOCK} x {parts}: {BLOCK} numbers of a row share a scale, found {size}"
                )
                yield fault("parallel.tp", message)


def _columns(model: Mapping[str, Any]) -> dict[str, int]:
    """Of the matrices that tensor parallelism splits by columns."""
    found, experts = {"width": model["width"]}, model.get("experts")
    if not experts or experts["first_dense"]:
        found["ffn"] = model["ffn"]
    if experts:
        found["experts.ffn x shared"] = experts["ffn"] * experts["shared"]
    return found


def _sizes(model: Mapping[str, Any]) -> dict[str, Any]:
    """The model with `auto` as numbers."""
    kv_heads = model["heads"] if model["kv_heads"] == "auto" else model["kv_heads"]
    ffn = ffn_size(model["width"]) if model["ffn"] == "auto" else model["ffn"]
    experts = {"experts": sized_experts(model["experts"], ffn)} if model.get("experts") else {}
    return {**model, "kv_heads": kv_heads, "ffn": ffn, **experts}
