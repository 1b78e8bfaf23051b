"""FlexAttention, which has no kernel without torch.compile: as flash attention to as many keys as
its mask leaves, in blocks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ...compat.cuda import without_modes
from ...dispatcher import Call
from ...session import Session
from .kernels import attended

_FLEX = "torch.nn.attention.flex_attention"
_SIDE = 128  # of a block


def install(session: Session) -> None:
    """Masks of blocks, and attention that skips them."""
    session.around(f"{_FLEX}:create_block_mask", replace=_block_mask)
    session.around(f"{_FLEX}:flex_attention", replace=_attended)


def _block_mask(call: Call, proceed: Callable[[], Any]) -> Any:
    """Of each block the corners are asked: one of which they are all hidden counts as skipped."""
    mask, batch, heads, rows, columns = (
        call.given(at, name) for at, name in enumerate(("mask_mod", "B", "H", "Q_LEN", "KV_LEN"))
    )
    batch, heads = batch or 1, heads or 1
    with without_modes():
        queries, keys = _corners(rows), _corners(columns)
        sample, head = torch.arange(batch)[:, None, None, None], torch.arange(heads)[:, None, None]
        corners = mask(sample, head, queries[:, None], keys)
        corners = corners.expand(batch, heads, len(queries), len(keys))
        blocks = corners.unflatten(2, (-1, 2)).unflatten(4, (-1, 2)).any(5).any(3)
        order = blocks.int().argsort(dim=-1, descending=True, stable=True)
        left = blocks.sum(-1).int(), order.int()
        return BlockMask.from_kv_blocks(
            *left, BLOCK_SIZE=_SIDE, mask_mod=mask, seq_lengths=(rows, columns)
        )


def _corners(length: int) -> Tensor:
    """The first and the last place of each block."""
    firsts = torch.arange(0, length, _SIDE)
    return torch.stack([firsts, (firsts + _SIDE - 1).clamp(max=length - 1)], 1).flatten()


def _attended(call: Call, proceed: Callable[[], Any]) -> Any:
    q, k, v = (call.given(at, name) for at, name in enumerate(("query", "key", "value")))
    mask, scale = call.given(4, "block_mask"), call.given(5, "scale")
    if call.given(7, "return_lse") or call.given(8, "return_aux"):
        return proceed()
    if mask is not None:
        keys = _left(mask, k.shape[2])
        k, v = k[:, :, :keys], v[:, :, :keys]
    return attended(q, k, v, None, 0.0, False, scale)


def _left(mask: BlockMask, keys: int) -> int:
    """How many keys the blocks of a mask leave to a query, on average."""
    counts = [mask.kv_num_blocks, mask.full_kv_num_blocks]
    with without_modes():
        blocks = sum(int(one.sum()) for one in counts if one is not None)
    return max(round(keys * blocks / (mask.kv_num_blocks.numel() * -(-keys // _SIDE))), 1)
