"""Bytes without which no rank can make a step of a spec, by arithmetic: what is surely held at one
moment, no more.

It refuses what cannot fit, in milliseconds. That something fits, it never says: buffers of the
collectives, the allocator and what comes in between are left out, so a plan is made for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...verifier.analysis.capacity import RESERVE
from ...verifier.config.devices import GIB
from ..spec.crosschecks_size import BYTES, device_memory
from ..spec.meshes import production

if TYPE_CHECKING:
    from ..spec import Spec
    from ..spec.meshes import Mesh

WEIGHT, FLOAT32 = 4, 4  # bytes of a number of the sharded parameters, and of the loss
STATE = {kind: size - 2 * WEIGHT for kind, size in BYTES.items()}  # without weight and gradient
# of the logits in float32: they, and their gradient
OF_THE_LOSS = 2 * FLOAT32


@dataclass(frozen=True)
class Least:
    """Bytes of a rank at the moment that needs most, by what they hold."""

    parts: Mapping[str, int]

    @property
    def bytes(self) -> int:
        """With what CUDA and NCCL take beside tensors."""
        return sum(self.parts.values()) + RESERVE

    def __str__(self) -> str:
        """`23.4 GiB (weights and moments 11.2, activations 8.0, ...)`."""
        parts = {**self.parts, "CUDA and NCCL": RESERVE}
        shown = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size)
        return f"{self.bytes / GIB:.1f} GiB ({shown})"


def mesh_on(spec: Spec, ranks: int) -> Mesh | None:
    """The mesh of a spec on so many ranks."""
    launch = {"engines": True, "nodes": 1, "devices_per_node": ranks}
    return production(spec["parallel"], launch)


def least(spec: Spec, mesh: Mesh | None) -> Least | None:
    """The bound of a decoder whose mesh is known; None for others."""
    if spec["model"]["kind"] != "decoder" or mesh is None:
        return None
    moments = (_loss(spec, mesh), _last_block_backward(spec, mesh), _update(spec, mesh))
    return max(map(Least, moments), key=lambda moment: moment.bytes)


def of_launch(spec: Spec) -> Least | None:
    """The bound on the mesh of the launch section."""
    return least(spec, production(spec["parallel"], spec["launch"]))


def refusal(spec: Spec) -> str:
    """Why no device of the launch section can make a step; "" if one may, or none is known."""
    memory, found = device_memory(spec["launch"]), of_launch(spec)
    if memory is None or found is None or found.bytes <= memory * GIB:
        return ""
    return f"a device has {memory:.4g} GiB, and a step needs at least {found}"


def bytes_of_state(spec: Spec, mesh: Mesh, parameters: int) -> tuple[int, int]:
    """The weights and the moments of a rank, of a model with so many parameters."""
    shard = parameters // (mesh.dp_shard * mesh.alike)
    return shard * WEIGHT, shard * STATE[spec["optimizer"]["kind"]]


def _update(spec: Spec, mesh: Mesh) -> dict[str, int]:
    """The step of the optimizer: weights, gradients, moments."""
    return {**_kept(spec, mesh), "gradients": _shard(spec, mesh) * WEIGHT * _trains_all(spec)}


def _loss(spec: Spec, mesh: Mesh) -> dict[str, int]:
    """The loss: the activations of all blocks, the head gathered, and the logits."""
    model, rows = spec["model"], _tokens(spec, mesh)
    logits = rows * model["vocabulary"] // mesh.tp
    head = model["vocabulary"] * model["width"] // mesh.tp
    if spec["memory"]["chunked_loss"]:
        # the gradients of the head and of its input, for which backward waits
        holds = {"gathered": 2 * head * _wide(spec), "logits": 0}
    else:
        holds = {"gathered": head * _wide(spec), "logits": logits * OF_THE_LOSS}
    return {**_during_backward(spec, mesh), **holds}


def _last_block_backward(spec: Spec, mesh: Mesh) -> dict[str, int]:
    """Backward of the last block: the activations of all blocks, and what is computed again of
    it.
    """
    found = _during_backward(spec, mesh)
    kind = spec["memory"]["activation_checkpointing"]
    kept = {"full": 0, "op-selective": _selected(spec, mesh)}.get(kind)
    if kept is not None and not _rewritten(spec):
        found["activations"] += _of_block(spec, mesh) - _stream(spec, mesh) - kept
    return found


def _during_backward(spec: Spec, mesh: Mesh) -> dict[str, int]:
    """Weights, moments, the gradients of the micro-batches before, the activations of all
    blocks.
    """
    train = spec["train"]
    passes = train["global_batch"] // (train["micro_batch"] * (mesh.ranks // mesh.alike))
    gradients = _shard(spec, mesh) * WEIGHT if passes > 1 and _trains_all(spec) else 0
    layers, kind = spec["model"]["layers"], spec["memory"]["activation_checkpointing"]
    stream = _stream(spec, mesh)
    if kind == "full" or _rewritten(spec):
        blocks = layers * stream
    elif kind == "op-selective":
        blocks = layers * (stream + _selected(spec, mesh))
    else:
        blocks = layers * _of_block(spec, mesh)
    return {**_kept(spec, mesh), "gradients": gradients, "activations": blocks}


def _kept(spec: Spec, mesh: Mesh) -> dict[str, int]:
    """Weights and moments on the device, all the time."""
    if not _trains_all(spec):  # frozen ones have half a byte at least (nf4)
        return {"weights": _shard(spec, mesh) // 2}
    return {"weights and moments": _shard(spec, mesh) * (WEIGHT + STATE[spec["optimizer"]["kind"]])}


def _shard(spec: Spec, mesh: Mesh) -> int:
    """Parameters of a rank that are on the device."""
    offloaded = spec["parallel"]["cpu_offload"]
    return 0 if offloaded else (spec.parameters or 0) // (mesh.dp_shard * mesh.alike)


def _stream(spec: Spec, mesh: Mesh) -> int:
    """Bytes of the input of a block."""
    width = int(spec["model"]["width"])
    return _tokens(spec, mesh) * width * _wide(spec) // mesh.tp


def _of_block(spec: Spec, mesh: Mesh) -> int:
    """Bytes that backward reads of a block, where each operator keeps its inputs: two norms, q, k,
    v, attention, and of a dense layer gate, its activation, up and their product.
    """
    model: dict[str, Any] = spec["model"]
    width, kv = model["width"], model["width"] // model["heads"] * model["kv_heads"]
    hidden = 0 if model.get("experts") else 4 * model["ffn"]
    rows = _tokens(spec, mesh) * _wide(spec) // mesh.tp
    return int(rows * (6 * width + 2 * kv + hidden))


def _selected(spec: Spec, mesh: Mesh) -> int:
    """Bytes that op-selective checkpointing keeps of a block beside its input: the result of
    attention, and of a dense layer the products q, v and gate.
    """
    model: dict[str, Any] = spec["model"]
    width, kv = model["width"], model["width"] // model["heads"] * model["kv_heads"]
    products = 0 if model.get("experts") else width + kv + model["ffn"]
    return int(_tokens(spec, mesh) * _wide(spec) // mesh.tp * (width + products))


def _tokens(spec: Spec, mesh: Mesh) -> int:
    """Tokens of a micro-batch on a rank."""
    return int(spec["train"]["micro_batch"] * spec["model"]["sequence_length"] // mesh.cp)


def _wide(spec: Spec) -> int:
    return 2 if spec["precision"]["param_dtype"] == "bfloat16" else FLOAT32


def _trains_all(spec: Spec) -> bool:
    return bool(spec["finetune"]["kind"] == "full")


def _rewritten(spec: Spec) -> bool:
    """Whether something else than eager autograd of all parameters decides what backward keeps."""
    return bool(spec["memory"]["compile"] or spec["precision"]["fp8"]) or not _trains_all(spec)
