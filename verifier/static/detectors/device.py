"""Devices, backends, and the order of activation checkpointing, compilation and sharding."""

from __future__ import annotations

from collections.abc import Iterator

from ...finding import Hit
from ..events import Event, Trace, covers
from ..looks import first_text, made_by, names_in, text
from ..values import Value, choices, holders
from .registry import detector


def _groups(trace: Trace) -> list[Event]:
    return trace.ops("dist.init_process_group")


def _backend(event: Event) -> Value | None:
    return event.arg(0, "backend")


@detector("cpu-offload-nccl-only")
def cpu_offload_nccl_only(trace: Trace) -> Iterator[Hit]:
    groups = _groups(trace)
    if not groups or not all(is_nccl(e) for e in groups):
        return
    for event, _ in trace.shards:
        if made_by(event.kwargs.get("offload_policy"), "fsdp.CPUOffloadPolicy") is not None:
            told = "CPUOffloadPolicy keeps gradients on the CPU, and the process group has NCCL only"
            yield trace.hit("cpu-offload-nccl-only", told, groups[0])
            return


def is_nccl(event: Event) -> bool:
    """Whether a process group is made with NCCL alone, whatever branch is taken."""
    backend = _backend(event)
    return backend is not None and all(one.kind == "const" and one.const == "nccl" for one in choices(backend))


@detector("set-device-missing")
def set_device_missing(trace: Trace) -> Iterator[Hit]:
    """A module goes to the current GPU before anything has said which one that is."""
    groups = _groups(trace)
    if not trace.certain or not trace.roots or not groups or not all(is_nccl(e) for e in groups):
        return
    words = (
        "set_device",
        "device_id",
        "CUDA_VISIBLE_DEVICES",
        "with torch.cuda.device",
        "set_default_device",
        "device_index",
    )
    if names_in(trace, *words):
        return
    meshes = trace.ops("dist.init_device_mesh")
    for event in trace.methods("cuda", "to"):
        if event.on is None or not trace.is_module(event.on) or (meshes and meshes[0].index < event.index):
            continue
        bare = event.method == "cuda" and not event.args and not event.kwargs and not event.open
        if bare or (event.method == "to" and _bare_cuda(event.arg(0, "device"))):
            told = f"{text(event.node)}: no rank has chosen its GPU, so all of them use the first"
            yield trace.hit("set-device-missing", told, event)
            return


def _bare_cuda(value: Value | None) -> bool:
    """Whether a device is "cuda" without a number."""
    made = made_by(value, "torch.device")
    named = made.args[0] if made is not None and len(made.args) == 1 else value
    return named is not None and all(one.kind == "const" and one.const == "cuda" for one in choices(named))


_WRAPPERS = ("ac.checkpoint_wrapper", "ac.apply_activation_checkpointing", "ac.checkpoint")


@detector("ac-compile-order")
def ac_compile_order(trace: Trace) -> Iterator[Hit]:
    compiled = [e for e in trace.ops("torch.compile") if e.args]
    in_place = [e for e in trace.methods("compile") if e.on is not None]
    for event in trace.ops(*_WRAPPERS[:2]):
        module = event.args[0] if event.args else None
        if module is None:
            continue
        shard = next((s for h in holders(module) if (s := trace.sharded_by(h, event)) is not None), None)
        if shard is not None:
            told = (
                f"{first_text(event)} is wrapped for activation checkpointing after it was sharded in line {shard.line}"
            )
            yield trace.hit("ac-compile-order", told, event)
            continue
        inside = [e for e in compiled if e.result is module] or [
            e for e in in_place if e.on is module and covers(e, event)
        ]
        if inside:
            told = f"{first_text(event)} is compiled in line {inside[0].line}, and checkpointed around that"
            yield trace.hit("ac-compile-order", told, event)
