"""A few numbers that stand for a whole tensor and add up over its shards.

`sketch(shard)` = [sum of squares, r1.x, r2.x, r3.x, r4.x] in float64, where r1..r4 are fixed pseudo-random vectors over the
*global* element index, uniform in [-1, 1). A sketch is linear but for its first number, so the sketches of the shards add up to that of
the tensor, and for two tensors a, b the mean of (rk.a - rk.b)^2 is |a - b|^2 / 3: a difference anywhere shows, without any
collective and without keeping the tensor.
"""

from __future__ import annotations

import torch

from .compat import tensors

PROBES = 4
_MULTIPLY = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = 0xBF58476D1CE4E5B9 - (1 << 64)
_SALT = 0x632BE59BD9B4E019
_CACHE_LIMIT = 1 << 20
_cache: dict[tuple[object, ...], torch.Tensor] = {}


def sketch(tensor: torch.Tensor) -> list[float]:
    """The sketch of this rank's part of `tensor` (shape [1 + PROBES], as floats)."""
    shape, own, offset = tensors.box(tensor)
    part = tensors.local(tensor)
    part = part.to_dense() if part.layout != torch.strided else part
    if part.numel() == 0:
        return [0.0] * (1 + PROBES)
    values = part.to(torch.float64).reshape(-1)
    if part.is_complex() or values.numel() != _numel(own):
        return [float(values.square().sum()), *[float("nan")] * PROBES]
    weights = _weights(shape, own, offset, values.device)
    return [float(values.square().sum()), *(weights @ values).tolist()]


def row_hashes(batch: list[torch.Tensor]) -> list[int]:
    """One hash for each row (dim 0) over all tensors of a batch; tensors of another length are left out."""
    batch = [tensors.local(t) for t in batch if t.dim() > 0 and t.layout == torch.strided]
    batch = [torch.view_as_real(t) if t.is_complex() else t for t in batch]
    if not batch:
        return []
    rows = batch[0].shape[0]
    if rows == 0:
        return []
    total: torch.Tensor | None = None
    for number, tensor in enumerate(t for t in batch if t.shape[0] == rows):
        flat = tensor.reshape(rows, -1)
        bits = flat.to(torch.float64).view(torch.int64) if flat.is_floating_point() else flat.to(torch.int64)
        index = torch.arange(flat.shape[1], device=flat.device, dtype=torch.int64)
        # Equal at every length: a row's hash must not depend on how rows are grouped into batches.
        mixed = (bits + _signed((number + 1) * _SALT)) * _hash(index, number)
        part = (mixed ^ (mixed >> 31)).sum(dim=1)
        total = part if total is None else total + part
    return [] if total is None else total.tolist()


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _weights(
    shape: tuple[int, ...], own: tuple[int, ...], offset: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """The pseudo-random vectors on the elements of one box: float64 [PROBES, numel(own)]."""
    key = (shape, own, offset, device)
    if (hit := _cache.get(key)) is not None:
        return hit
    index = torch.zeros((), dtype=torch.int64, device=device)
    stride = 1
    for dim in reversed(range(len(shape))):
        along = (torch.arange(own[dim], device=device, dtype=torch.int64) + offset[dim]) * stride
        index = index + along.reshape(-1, *[1] * (len(shape) - 1 - dim))
        stride *= shape[dim]
    flat = index.expand(own).reshape(-1)
    rows = [(_hash(flat, k) >> 11).to(torch.float64) / float(1 << 52) for k in range(PROBES)]
    weights = torch.stack(rows)
    if flat.numel() <= _CACHE_LIMIT:
        _cache[key] = weights
    return weights


def _hash(index: torch.Tensor, salt: int) -> torch.Tensor:
    mixed = (index + (salt + 1) * 0x5851F42D) * _MULTIPLY
    mixed = (mixed ^ (mixed >> 29)) * _MIX
    return mixed ^ (mixed >> 32)


def _signed(number: int) -> int:
    """The number modulo 2**64, as int64 would hold it."""
    return (number + 2**63) % 2**64 - 2**63
