"""The same initial weights in every run that is compared.

Each rank of the train run saves the initial weights of its shards; the reference and single-process
runs load them before their first forward. So a comparison starts from equal weights even if a
script's initialisation depends on the rank or the world size (which is recorded before, and judged
by its own rule). Quantised weights, whose parts make no whole, stay as the script makes them.

A weight of which ranks hold parts by the script's own division is joined for one process; the order
of its parts is a guess, which the first loss confirms (analysis/comparison.py, `divided`).

Behind steps that are skipped the state of the optimizers and the buffers that are equal on all
ranks are shared, too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import load, nn, save  # before the probe patches them
from torch.optim import Optimizer

from ..launch.request import Request
from .compat.groups import Slot
from .compat.tensors import box, holds_others, layout, local


@dataclass(frozen=True)
class Held:
    """A weight, or a tensor of an optimizer's state that is laid out as its weight is."""

    name: str
    values: torch.Tensor  # this rank's part
    weight: torch.Tensor
    is_weight: bool = False


def share(
    root: nn.Module,
    slots: list[Slot],
    request: Request,
    rank: int,
    number: int,
    optimizers: Sequence[Optimizer] = (),
) -> str:
    """Save or load the starting point of root `number`, as the request says.

    Returns what was done, for the trace.
    """
    if not request.starting_point:
        return "own"
    folder = Path(request.starting_point)
    quantised = [slot.name for slot in slots if holds_others(slot.param)]
    slots = [slot for slot in slots if slot.name not in quantised]
    state = _state(slots, optimizers) if request.skip_steps else {}
    held = [Held(slot.name, local(slot.param), slot.param, True) for slot in slots]
    held += list(_laid_out(slots, state))
    if request.leave_starting_point:
        folder.mkdir(parents=True, exist_ok=True)
        found = {
            "rank": rank,
            "parts": _own_parts(held, rank),
            "quantised": quantised,
            "buffers": {name: value.detach().cpu().clone() for name, value in root.named_buffers()},
            "state": {name: _small(values) for name, values in state.items()},
        }
        save(found, folder / f"root{number}.rank{rank}.pt")
        return "left"
    files = sorted(folder.glob(f"root{number}.rank*.pt"))
    if not files:
        return "none to load"
    saved = [load(file, weights_only=True, map_location="cpu") for file in files]
    trouble = _load(saved, held, request, rank)
    if request.skip_steps:
        trouble = trouble or _load_numbers(saved, state)
        _load_buffers(saved, root)
    return trouble or "loaded"


def _state(slots: list[Slot], optimizers: Sequence[Optimizer]) -> dict[str, dict[str, Any]]:
    """{weight: its state}, as the optimizers hold it."""
    names = {id(slot.param): slot.name for slot in slots}
    return {
        names[id(param)]: state
        for optimizer in optimizers
        for param, state in optimizer.state.items()
        if id(param) in names
    }


def _laid_out(slots: list[Slot], state: dict[str, dict[str, Any]]) -> Iterator[Held]:
    """What of the state is laid out as its weight is."""
    for slot in slots:
        for key, value in state.get(slot.name, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() and not holds_others(value):
                part = local(value)
                if part.shape == local(slot.param).shape:
                    yield Held(f"{slot.name} {key}", part, slot.param)


def _small(state: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a state, such as its count of steps."""
    return {
        key: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
        if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and not value.dim())
    }


def _own_parts(held: list[Held], rank: int) -> dict[str, Any]:
    """{name: (this rank's part, its offset, the ranks that share it)}"""
    return {
        one.name: (
            one.values.cpu().clone(),
            list(box(one.weight)[2]),
            layout(one.weight, rank).ranks,
        )
        for one in held
    }


@torch.no_grad()
def _load(saved: list[dict[str, Any]], held: list[Held], request: Request, rank: int) -> str:
    """Load the parts of a whole into this rank's; why that cannot be, or ""."""
    for one in held:
        # Parts of quantised weights make no whole: they stay as the script makes them
        # (NF4 of QLoRA).
        if any(one.name in item["quantised"] for item in saved):
            continue
        parts = _parts(saved, one.name, rank)
        if not parts:
            return f"no {one.name} to load"
        full, wanted = _whole(parts), tuple(one.weight.shape)
        if full.shape != wanted:
            joined = _joined(saved, one.name, wanted)
            if joined is None:
                return (
                    f"{one.name} has the shape {list(wanted)} here, {list(full.shape)} in the"
                    " train run"
                )
            full = joined
        _, own, start = box(one.weight)
        values = full[_slices(start, own)]
        if one.is_weight and request.nudge:
            values = _perturbed(values)
        if one.is_weight and request.round_to and values.is_floating_point():
            # the rounded-weights run
            values = values.to(getattr(torch, request.round_to)).to(values.dtype)
        one.values.copy_(values)
    return ""


@torch.no_grad()
def _load_numbers(saved: list[dict[str, Any]], state: dict[str, dict[str, Any]]) -> str:
    """Load what of the optimizers' state is a number; why that cannot be, or ""."""
    numbers = {name: small for item in saved for name, small in item["state"].items()}
    for name, small in numbers.items():
        own = state.get(name, {})
        for key, value in small.items():
            if key not in own:
                return f"no {key} of {name} to load"
            if isinstance(own[key], torch.Tensor):
                own[key].copy_(torch.as_tensor(value))
            else:
                own[key] = type(own[key])(value)
    return ""


@torch.no_grad()
def _load_buffers(saved: list[dict[str, Any]], root: nn.Module) -> None:
    """Load the buffers that are equal on all ranks; others are a rank's own."""
    for name, buffer in root.named_buffers():
        known = [item["buffers"].get(name) for item in saved]
        first = known[0]
        if first is None or first.shape != buffer.shape:
            continue
        if all(one is not None and torch.equal(one, first) for one in known):
            local(buffer).copy_(first)


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


def _whole(parts: list[tuple[torch.Tensor, list[int]]]) -> torch.Tensor:
    """The tensor of which these are the parts, each with its offset."""
    full = torch.empty(_shape(parts), dtype=parts[0][0].dtype)
    for part, offset in reversed(parts):
        full[_slices(offset, part.shape)] = part
    return full


def _joined(saved: list[dict[str, Any]], name: str, wanted: tuple[int, ...]) -> torch.Tensor | None:
    """What ranks of several meshes hold of a weight that the script divides itself (experts, a
    vocabulary, columns of a layer), one behind the other in the order of the ranks, where that has
    the shape that one process needs; None where it has not.
    """
    pieces: list[torch.Tensor] = []
    for item in saved:
        if name in item["parts"]:
            own = item["parts"][name]
            # a plain tensor, of which no mesh says who shares it, is this rank's alone
            piece = _whole(_parts(saved, name, item["rank"])) if own[2] else own[0]
            if not any(torch.equal(piece, other) for other in pieces):
                pieces.append(piece)
    shape = pieces[0].shape if pieces else torch.Size()
    apart = [dim for dim, (a, b) in enumerate(zip(shape, wanted, strict=False)) if a != b]
    if len(shape) != len(wanted) or len(apart) != 1 or any(p.shape != shape for p in pieces):
        return None
    full = torch.cat(pieces, dim=apart[0])
    return full if full.shape == wanted else None


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
