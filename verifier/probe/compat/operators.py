"""What the probe asks of torch's operators and of its autograd graph by private names; run on torch
2.13.0.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only as tree_map_only

from .cuda import without_modes
from .tensors import local

FUSED_NORM = "_fused_rms_norm"
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among the arguments or results of an operator, and in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def schema(operator: Any) -> Any:
    """The schema of an operator: name, arguments, returns."""
    return operator._schema


@functools.cache
def is_composite(operator: Any) -> bool:
    """Whether an operator only calls others: a dispatch mode is given it whole where autograd is
    off, as in inference mode.

    The backwards of SiLU and Mish, and RMS norm, call others only on devices without a kernel of
    theirs.
    """
    if not isinstance(operator, torch._ops.OpOverload) or operator.namespace == "prim":
        return False
    if schema(operator).name == f"aten::{FUSED_NORM}":
        return False
    composite, own = (
        torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)  # type: ignore[no-untyped-call]
        for key in (_COMPOSITE, torch._C.DispatchKey.CPU)
    )
    return composite and not own


def composed(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of the operators that a composite one calls."""
    return operator._op_dk(_COMPOSITE, *args, **kwargs)


def is_process_group(value: Any) -> bool:
    """Whether an argument of a collective is the group."""
    return "ProcessGroup" in str(value._type())


def node_of_backward() -> int | None:
    """The number of the autograd node that runs, which is that of the forward's operator; None
    outside a backward.
    """
    node = torch._C._current_autograd_node()
    return node._sequence_nr() if node is not None else None


def node_of_forward() -> int:
    """The number of the autograd node that the operator has made that ran last."""
    return int(torch._C._autograd._get_sequence_nr()) - 1


def empty_subclass(cls: type[Tensor]) -> Tensor:
    """A tensor without elements of a subclass, whose own constructor refuses what a dispatch mode
    has made.
    """
    return Tensor._make_subclass(cls, torch.empty(0))


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, drop: float, causal: bool, scale: float | None
) -> Tensor:
    """CUDA's flash attention; tensors of [batch, heads, sequence, head]."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention
    return attention(q, k, v, drop, causal, False, scale=scale)[0]  # type: ignore[no-any-return]


def efficient_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    drop: float,
    causal: bool,
    scale: float | None,
) -> Tensor:
    """CUDA's memory-efficient attention, which takes a mask; tensors of [batch, heads, sequence,
    head].
    """
    needs = any(one.requires_grad for one in (q, k, v))
    attention = torch.ops.aten._scaled_dot_product_efficient_attention
    return attention(q, k, v, mask, needs, drop, causal, scale=scale)[0]  # type: ignore[no-any-return]


def fused_norm(
    value: Tensor, shape: list[int], weight: Tensor | None, eps: float | None
) -> Tensor | None:
    """RMS norm in one kernel; None on a torch without it."""
    if not hasattr(torch.ops.aten, FUSED_NORM):
        return None
    made: Tensor = _FusedNorm.apply(value, shape, weight, eps)[0]  # type: ignore[no-untyped-call]
    return made


class _FusedNorm(torch.autograd.Function):
    """CUDA's RMS norm and its backward.

    Autograd of CPU tensors calls their parts, and keeps what these keep.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        value: Tensor, shape: list[int], weight: Tensor | None, eps: float | None
    ) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.aten, FUSED_NORM)(value, shape, weight, eps)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        value, ctx.shape, weight, ctx.eps = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(value, weight, output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
        value, weight, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # a backward of the backward: of the parts, on CUDA too
            given = [
                one
                for one, needs in (
                    (value, ctx.needs_input_grad[0]),
                    (weight, ctx.needs_input_grad[2]),
                )
                if needs
            ]
            normed = getattr(torch.ops.aten, FUSED_NORM)(value, ctx.shape, weight, ctx.eps)[0]
            found = iter(torch.autograd.grad(normed, given, gradient, create_graph=True))
            return tuple(next(found) if needs else None for needs in ctx.needs_input_grad)
        needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        of_value, of_weight = torch.ops.aten._fused_rms_norm_backward(
            gradient, value, ctx.shape, scale, weight, needs
        )
        return of_value, None, of_weight, None


def constant_applied(node: Any) -> tuple[float, Any] | None:
    """(the constant that a division or multiplication applies, the node of its other operand)."""
    name, behind = node.name(), [one for one, _ in node.next_functions]
    if name not in ("DivBackward0", "MulBackward0") or sum(one is not None for one in behind) != 1:
        return None
    first = behind[0] is not None
    if name == "DivBackward0" and not first:
        return None
    value = node._saved_other if first else node._saved_self
    if not isinstance(value, Tensor) or value.numel() != 1:
        return None
    # A mode is given a number in place of such a tensor, of which it can ask no value (dion, with
    # CUDA on the CPU).
    with without_modes():
        number = float(local(value))
    if not number:
        return None
    return (1.0 / number if name == "DivBackward0" else number), behind[0 if first else 1]
