"""The same initial weights in every run that is compared.

Each rank of the train run saves the initial weights of its shards; the reference and single-process
runs load them before their first forward. So a comparison starts from equal weights even if a
script's initialisation depends on the rank or the world size (which is recorded before, and judged
by its own rule). Quantised weights, whose parts make no whole, stay as the script makes them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import load, nn, save  # before the probe patches them

from ..launch.request import Request
from .compat.groups import Slot
from .compat.tensors import box, holds_others, layout, local


def share(root: nn.Module, slots: list[Slot], request: Request, rank: int, number: int) -> str:
    """Save or load the starting point of root `number`, as the request says.

    Returns what was done, for the trace.
    """
    if not request.starting_point:
        return "own"
    folder = Path(request.starting_point)
    quantised = [slot.name for slot in slots if holds_others(slot.param)]
    slots = [slot for slot in slots if slot.name not in quantised]
    if request.leave_starting_point:
        folder.mkdir(parents=True, exist_ok=True)
        buffers = {name: value.detach().cpu().clone() for name, value in root.named_buffers()}
        parts = _own_parts(slots, rank)
        save(
            {"rank": rank, "parts": parts, "quantised": quantised, "buffers": buffers},
            folder / f"root{number}.rank{rank}.pt",
        )
        return "left"
    files = sorted(folder.glob(f"root{number}.rank*.pt"))
    if not files:
        return "none to load"
    saved = [load(file, weights_only=True, map_location="cpu") for file in files]
    return _load(saved, slots, request, rank)


def _own_parts(slots: list[Slot], rank: int) -> dict[str, Any]:
    """{parameter: (this rank's part, its offset, the ranks that share it)}"""
    return {
        s.name: (local(s.param).cpu().clone(), list(box(s.param)[2]), layout(s.param, rank).ranks)
        for s in slots
    }


@torch.no_grad()
def _load(saved: list[dict[str, Any]], slots: list[Slot], request: Request, rank: int) -> str:
    for slot in slots:
        # Parts of quantised weights make no whole: they stay as the script makes them
        # (NF4 of QLoRA).
        if any(slot.name in item["quantised"] for item in saved):
            continue
        parts = _parts(saved, slot.name, rank)
        if not parts:
            return f"no {slot.name} to load"
        if (shape := _shape(parts)) != tuple(slot.param.shape):
            return (
                f"{slot.name} has the shape {list(slot.param.shape)} here, {list(shape)} in the"
                " train run"
            )
        full = torch.empty(shape, dtype=parts[0][0].dtype)
        for part, offset in reversed(parts):
            full[_slices(offset, part.shape)] = part
        _, own, start = box(slot.param)
        values = full[_slices(start, own)]
        if request.nudge:
            values = _perturbed(values)
        if request.round_to and values.is_floating_point():  # the rounded-weights run
            values = values.to(getattr(torch, request.round_to)).to(values.dtype)
        local(slot.param).copy_(values)
    return "loaded"


def _parts(
    saved: list[dict[str, Any]], name: str, rank: int
) -> list[tuple[torch.Tensor, list[int]]]:
    """The parts of a parameter, each with its offset: of the ranks that share it with this one,
    where its mesh has not all ranks.

    Ranks of other meshes may hold other weights: tensor parallelism or experts that the script
    divides itself.
    """
    held = {item["rank"]: item["parts"][name] for item in saved if name in item["parts"]}
    # Ranks of other meshes hold other weights (experts, own tensor parallelism): the whole is made
    # of this mesh's parts (scripts that divide tensor parallelism or experts
    # themselves: exam round 9 ha_09).
    sharing = held[rank][2] if rank in held else []
    return [part[:2] for holder, part in held.items() if not sharing or holder in sharing]


def _slices(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def _shape(parts: list[tuple[torch.Tensor, list[int]]]) -> tuple[int, ...]:
    """The shape of the whole tensor of these parts, each with its offset."""
    ends = [[side.stop for side in _slices(offset, part.shape)] for part, offset in parts]
    return tuple(max(along) for along in zip(*ends, strict=False))


def _perturbed(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with each element one unit in the last place up or down, in turn (the perturbed
    run).
    """
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return tensor
    # One unit in the last place, up and down in turn: the smallest change that rounding itself
    # makes, without a drift.
    up = torch.nextafter(tensor, torch.full_like(tensor, float("inf")))
    down = torch.nextafter(tensor, torch.full_like(tensor, float("-inf")))
    odd = (torch.arange(tensor.numel()) % 2).reshape(tensor.shape).bool()
    return torch.where(odd, up, down)
