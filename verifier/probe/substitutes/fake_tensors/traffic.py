"""Bytes that operators without matrix products read and write, if each is a kernel of its own, as
without torch.compile.
"""

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...compat.operators import schema, tensors_in

# They read a part of their first tensor, or nothing of it.
_PARTS = frozenset(
    (
        *(
            "embedding",
            "index",
            "gather",
            "index_select",
            "nll_loss_forward",
            "nll_loss_backward",
            "select_backward",
        ),
        *(
            "slice_backward",
            "embedding_dense_backward",
            "index_put",
            "scatter",
            "scatter_add",
            "index_copy",
            "zeros_like",
        ),
        *("ones_like", "full_like", "new_zeros", "new_ones", "new_full", "rand_like", "randn_like"),
    )
)
_PARTS_IN_PLACE = frozenset(
    ("index_put_", "_index_put_impl_", "scatter_", "scatter_add_", "index_add_", "index_copy_")
)


def moved(func: Any, given: Sequence[Tensor], result: Any) -> int:
    """Bytes that an operator on CUDA reads and writes at least."""
    name, writes, views = _manner(func)
    if views or "empty" in name or name in ("resize_", "set_"):
        return 0
    if writes:
        return sum(map(_bytes, given[1:] if name in _PARTS_IN_PLACE else given))
    made = sum(map(_bytes, tensors_in((result,))))
    return made + (0 if name in _PARTS else sum(map(_bytes, given)))


def _bytes(tensor: Tensor) -> int:
    """Of its own elements: what is expanded is read once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return count


@functools.cache
def _manner(func: Any) -> tuple[str, bool, bool]:
    """(name, whether it writes to an argument, whether its result is a view or no tensor)."""
    known = schema(func)
    aliases = [
        argument.alias_info for argument in known.arguments if argument.alias_info is not None
    ]
    writes = any(one.is_write for one in aliases)
    views = not writes and (
        bool(aliases) or not any("Tensor" in str(one.type) for one in known.returns)
    )
    name = known.name.partition("::")[2]
    return name, writes, views or name == "_unsafe_view"
