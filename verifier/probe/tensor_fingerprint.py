"""A few numbers that represent a whole tensor and add up over its shards.

`sketch(shard)` = [sum of squares, r1.x, r2.x, r3.x, r4.x] in float64, where r1..r4 are fixed
pseudo-random vectors over the *global* element index, uniform in [-1, 1). The sketches of the
shards add up to that of the tensor, and for two tensors a, b the mean of (rk.a - rk.b)^2 is |a -
b|^2 / 3: a difference anywhere shows, without a collective or a copy of the tensor.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterator

import torch

from .compat import tensors
from .compat.cuda import TENSOR_DEVICE, without_modes

# 4 random sums: that a difference cancels in all of them has no measurable probability.
PROBES = 4
_MULTIPLY = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = 0xBF58476D1CE4E5B9 - (1 << 64)
_SALT = 0x632BE59BD9B4E019
# Values with which rows are padded; a positive one is not among them, since it may end a sentence
# twice.
_PADS = (0, -1, -100)  # of tokens, labels, and (0) features; a positive one also ends a sentence
# A sparse tensor up to this size is made dense; it was unread in round 7 (exam round 7: a sparse
# tensor that the probe could not read).
_DENSE = 1 << 20  # elements up to which a sparse tensor is made dense
_BLOCK = 1 << 16  # elements that are sketched at a time, at about 80 bytes each
_CACHE_LIMIT = 1 << 20  # elements whose vectors are kept, at 32 bytes each
_cache: dict[tuple[object, ...], torch.Tensor] = {}


class Values:
    """`without(tensor)`: whether it has no values; a capacity run says so of its tensors, whose
    sketch is that of their size.
    """

    without: Callable[[torch.Tensor], bool] = staticmethod(lambda tensor: False)


def sketch(tensor: torch.Tensor) -> list[float]:
    """The sketch of this rank's part of `tensor` (shape [1 + PROBES], as floats), made block by
    block: a large one needs little memory.
    """
    shape, own, offset = tensors.box(tensor)
    held = tensors.local(tensor)
    part = tensors.plain(held)
    if Values.without(part):
        return [float(part.numel()), *[0.0] * PROBES]
    with without_modes():
        in_a_row = part is not held and part.numel() != math.prod(own)
        if in_a_row or (part.layout != torch.strided and part.numel() > _DENSE):
            values = tensors.elements(part)
            return _sketch(values, tuple(values.shape), tuple(values.shape), (0,) * values.dim())
        return _sketch(
            part.to_dense() if part.layout != torch.strided else part, shape, own, offset
        )


def _sketch(
    part: torch.Tensor, shape: tuple[int, ...], own: tuple[int, ...], offset: tuple[int, ...]
) -> list[float]:
    if part.numel() == 0:
        return [0.0] * (1 + PROBES)
    if part.is_complex() or part.numel() != math.prod(own):
        real = torch.view_as_real(part) if part.is_complex() else part
        squares = sum(
            float(block.to(torch.float64).square().sum())
            for block, _ in blocks(real, (0,) * real.dim(), _BLOCK)
        )
        return [squares, *[float("nan")] * PROBES]
    part = part.reshape(own)
    if part.numel() <= _BLOCK:
        total = _sums(part, shape, offset)
    else:
        total = torch.zeros(1 + PROBES, dtype=torch.float64, device=TENSOR_DEVICE(part))
        # one tensor of sums: small ones would lie between freed blocks
        for block, corner in blocks(part, offset, _BLOCK):
            total += _sums(block, shape, corner)
    sums: list[float] = total.tolist()
    return sums


def _sums(block: torch.Tensor, shape: tuple[int, ...], corner: tuple[int, ...]) -> torch.Tensor:
    values = block.reshape(-1).to(torch.float64)
    probes = _weights(shape, tuple(block.shape), corner, TENSOR_DEVICE(values)) @ values
    return torch.cat([values.square().sum().reshape(1), probes])


def blocks(
    part: torch.Tensor, corner: tuple[int, ...], most: int
) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """Views of at most `most` elements that make up `part`, each with its corner in the whole
    tensor.
    """
    if part.numel() <= most:
        yield part, corner
        return
    dim = next(d for d, size in enumerate(part.shape) if size > 1)
    rows = max(1, most // (part.numel() // part.shape[dim]))
    for start in range(0, part.shape[dim], rows):
        below = part.narrow(dim, start, min(rows, part.shape[dim] - start))
        yield from blocks(below, (*corner[:dim], corner[dim] + start, *corner[dim + 1 :]), most)


def sums(tensor: torch.Tensor) -> tuple[float, float]:
    """The sum of the elements of this rank's part of a tensor, and of their absolute values: the
    same however it is cut.
    """
    part = tensors.plain(tensors.local(tensor))
    if part.layout != torch.strided or part.is_complex() or Values.without(part):
        return 0.0, 0.0
    with without_modes():
        wide = part.detach().to(torch.float64)
        return float(wide.sum()), float(wide.abs().sum())


def row_hashes(batch: list[torch.Tensor]) -> list[int]:
    """One hash for each row of a batch (`row_sums`); [] of one that has none."""
    total = row_sums(batch)
    return [] if total is None else total.tolist()


def row_sums(batch: list[torch.Tensor]) -> torch.Tensor | None:
    """One hash for each row (dim 0) over all tensors of a batch, as int64 [rows] on their device;
    tensors of another length are left out.

    It does not depend on how far rows are padded (to the longest of a batch, which is each rank's
    own): of a value that repeats at a row's end the first counts, and none after others if it is
    one of `_PADS`.
    """
    batch = [tensors.local(t) for t in batch if t.dim() > 0 and t.layout == torch.strided]
    batch = [torch.view_as_real(t) if t.is_complex() else t for t in batch]
    rows = batch[0].shape[0] if batch else 0
    total: torch.Tensor | None = None
    for number, tensor in enumerate(t for t in batch if rows and t.shape[0] == rows):
        flat = tensor.reshape(rows, -1)
        bits = (
            flat.to(torch.float64).view(torch.int64)
            if flat.is_floating_point()
            else flat.to(torch.int64)
        )
        index = torch.arange(flat.shape[1], device=flat.device, dtype=torch.int64)
        # Equal at every length: a row's hash must not depend on how rows are grouped into batches.
        salt = ((number + 1) * _SALT + 2**63) % 2**64 - 2**63  # as int64 holds it
        mixed = (bits + salt) * _hash(index, number)
        last = bits[:, -1:]
        before = (
            torch.where(bits != last, index + 1, 0).amax(dim=1, keepdim=True)
            if len(index)
            else index
        )
        # by numbers of Python: a tensor that is sent to a device would wait for it
        pads = functools.reduce(operator.or_, (last == pad for pad in _PADS))
        counts = index < torch.where(pads, before, before + 1).clamp(min=1)
        part = torch.where(counts, mixed ^ (mixed >> 31), 0).sum(dim=1)
        total = part if total is None else total + part.to(total.device)
    return total


def _weights(
    shape: tuple[int, ...], own: tuple[int, ...], offset: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """The pseudo-random vectors at the elements of one box: float64 [PROBES, numel(own)]."""
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
    weights = torch.empty(PROBES, flat.numel(), dtype=torch.float64, device=device)
    for k in range(PROBES):
        weights[k] = _hash(flat, k).bitwise_right_shift_(11)
    weights /= float(1 << 52)
    if flat.numel() + sum(kept.shape[1] for kept in _cache.values()) <= _CACHE_LIMIT:
        _cache[key] = weights
    return weights


def _hash(index: torch.Tensor, salt: int) -> torch.Tensor:
    # in place from here on: a large tensor must not need several copies
    mixed = index + (salt + 1) * 0x5851F42D
    mixed *= _MULTIPLY
    mixed ^= mixed >> 29
    mixed *= _MIX
    mixed ^= mixed >> 32
    return mixed
