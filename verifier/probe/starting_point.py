"""The same initial weights in every run that is compared.

The train run leaves its initial weights, each rank its shards; the reference and single-process runs load them before their first
forward. So a comparison starts from equal weights even where a script's initialisation depends on the rank or the world size
(which is recorded before, and judged by a rule of its own).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import load, nn, save  # before the probe listens to torch.save and torch.load

from .compat.tensors import Slot, box, local


def share(root: nn.Module, slots: list[Slot], request: dict[str, Any], rank: int, number: int) -> str:
    """Leave or load the starting point of root `number`, as the request says. Returns what was done, for the trace."""
    folder = Path(request["starting_point"]) if request["starting_point"] else None
    if folder is None:
        return "own"
    if request["leave_starting_point"]:
        folder.mkdir(parents=True, exist_ok=True)
        mine = {s.name: (local(s.param).cpu().clone(), list(box(s.param)[2])) for s in slots}
        buffers = {name: value.detach().cpu().clone() for name, value in root.named_buffers()}
        save({"parts": mine, "buffers": buffers}, folder / f"root{number}.rank{rank}.pt")
        return "left"
    files = sorted(folder.glob(f"root{number}.rank*.pt"))
    if not files:
        return "none to load"
    saved = [load(file, weights_only=True, map_location="cpu") for file in files]
    with torch.no_grad():
        for slot in slots:
            parts = [item["parts"][slot.name] for item in saved if slot.name in item["parts"]]
            if not parts or _shape(parts) != tuple(slot.param.shape):
                return f"no {slot.name} to load"
            target = local(slot.param)
            full = torch.empty(tuple(slot.param.shape), dtype=parts[0][0].dtype)
            for part, offset in reversed(parts):
                full[tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))] = part
            _, own, start = box(slot.param)
            start_values = full[tuple(slice(o, o + n) for o, n in zip(start, own, strict=True))]
            target.copy_(_rounded(_nudged(start_values, request["nudge"]), request["round_to"]))
    return "loaded"


def _shape(parts: list[tuple[torch.Tensor, list[int]]]) -> tuple[int, ...]:
    """The shape of the tensor that these parts, each with its offset, are of."""
    ends = [[o + n for o, n in zip(offset, part.shape, strict=True)] for part, offset in parts]
    return tuple(max(along) for along in zip(*ends, strict=False))


def _rounded(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """`tensor`, as a lower precision would hold it (the rounded-weights run)."""
    return tensor.to(getattr(torch, dtype)).to(tensor.dtype) if dtype and tensor.is_floating_point() else tensor


def _nudged(tensor: torch.Tensor, nudge: bool) -> torch.Tensor:
    """`tensor`, with every other element one unit in the last place away if `nudge` (the perturbed run)."""
    if not nudge or not tensor.is_floating_point() or tensor.numel() == 0:
        return tensor
    up = torch.nextafter(tensor, torch.full_like(tensor, float("inf")))
    down = torch.nextafter(tensor, torch.full_like(tensor, float("-inf")))
    odd = (torch.arange(tensor.numel()) % 2).reshape(tensor.shape).bool()
    return torch.where(odd, up, down)
