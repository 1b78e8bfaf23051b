"""The floating-point operations of an operator: torch's formulas, and those that its table lacks;
run on torch 2.13.0.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .names import FLOP_FORMULAS, need
from .operators import schema

Formula = Callable[..., int]

_FORMULAS: dict[Any, Formula] = need(FLOP_FORMULAS)


def _product(a: Tensor, b: Tensor) -> int:
    """Of matrices, of a batch of them, or of groups: how many rows a group has is unknown, and
    together they are those of the operand that is split.
    """
    split = a.dim() == 3 and b.dim() == 2  # the columns of `b` among the matrices of `a`
    return 2 * (math.prod(a.shape[1:]) if split else a.numel()) * b.shape[-1]


def _first(a: Tensor, b: Tensor, *given: Any, **named: Any) -> int:
    return _product(a, b)


_LACKED: dict[str, Formula] = {
    "_grouped_mm": _first,
    "_scaled_grouped_mm": _first,
    "_scaled_grouped_mm_v2": _first,
    "_scaled_mm_v2": _first,
    "_int_mm": _first,
}


def formula(operator: Any) -> Formula | None:
    """What counts the FLOPs of an operator, given its arguments and its result as `out_val`; None
    for one without products.
    """
    known = _FORMULAS.get(getattr(operator, "_overloadpacket", None))
    return known or _by_name(operator)


@functools.cache
def _by_name(operator: Any) -> Formula | None:
    """Of an operator that torch's table lacks."""
    space, _, name = schema(operator).name.partition("::")
    return _LACKED.get(name) if space == "aten" else None
