"""The floating-point operations of an operator: torch's formulas, and those that its table lacks;
run on torch 2.13.0.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
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


def _added(sum_: Tensor, a: Tensor, b: Tensor, *given: Any, **named: Any) -> int:
    return _product(a, b)


def _linear(a: Tensor, weight: Tensor, *given: Any, **named: Any) -> int:
    return 2 * a.numel() * len(weight)


_LACKED: dict[str, Formula] = {
    "_grouped_mm": _first,
    "_scaled_grouped_mm": _first,
    "_scaled_grouped_mm_v2": _first,
    "_scaled_mm_v2": _first,
    "_int_mm": _first,
    "addbmm": _added,
    "_addmm_activation": _added,
    "linear": _linear,
}


def formula(operator: Any) -> Formula | None:
    """What counts the FLOPs of an operator, given its arguments and its result as `out_val`; None
    for one without products.
    """
    known = _FORMULAS.get(getattr(operator, "_overloadpacket", None))
    return known or _by_name(operator)


@functools.cache
def _by_name(operator: Any) -> Formula | None:
    """Of an operator that torch's table lacks: in place a product costs the same."""
    space, _, name = schema(operator).name.partition("::")
    if space != "aten":
        return None
    name = name.removesuffix("_")
    return _FORMULAS.get(getattr(torch.ops.aten, name, None)) or _LACKED.get(name)
