"""CUDA's autocast on CPU tensors: the operators that it runs in another dtype, where the CPU's
leaves them alone.

The lists are those of torch 2.13.0 (ATen/autocast_mode.h), without what consists of operators that
are listed themselves.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

_LOW = ("addmv", "addr", "mv", "prelu")
_FLOAT32 = (
    *(
        "acos",
        "asin",
        "cosh",
        "erfinv",
        "exp",
        "expm1",
        "log",
        "log10",
        "log2",
        "log1p",
        "reciprocal",
        "rsqrt",
    ),
    *(
        "sinh",
        "tan",
        "pow.Tensor_Scalar",
        "pow.Tensor_Tensor",
        "pow.Scalar",
        "softplus",
        "layer_norm",
        "rms_norm",
    ),
    *(
        "native_layer_norm",
        "group_norm",
        "frobenius_norm.dim",
        "nuclear_norm",
        "nuclear_norm.dim",
        "cdist",
        "dist",
    ),
    *(
        "cosine_similarity",
        "cosine_embedding_loss",
        "poisson_nll_loss",
        "nll_loss",
        "nll_loss2d",
        "kl_div",
        "l1_loss",
    ),
    *(
        "hinge_embedding_loss",
        "smooth_l1_loss",
        "huber_loss",
        "mse_loss",
        "margin_ranking_loss",
        "soft_margin_loss",
    ),
    *(
        "multilabel_margin_loss",
        "triplet_margin_loss",
        "multi_margin_loss",
        "binary_cross_entropy_with_logits",
    ),
    *(
        "pdist",
        "renorm",
        "logsumexp",
        "upsample_nearest1d",
        "upsample_nearest2d",
        "upsample_nearest3d",
    ),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
    *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)
_INTO_FLOAT32 = (  # by their argument `dtype`
    *(
        "prod",
        "prod.dim_int",
        "softmax.int",
        "log_softmax.int",
        "cumprod",
        "cumsum",
        "sum",
        "sum.dim_IntList",
    ),
    *("linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord"),
)
_WIDEST = (
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "vdot",
    "index_put",
    "tensordot",
    "scatter_add",
)
_KEY = "AutocastCPU"
_LOWEST = (torch.float16, torch.bfloat16)


def cast_as_cuda() -> torch.library.Library:
    """Let the CPU's autocast cast what CUDA's casts too, for as long as the result lives.

    What it casts itself stays as it is.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    manners = (
        (_LOW, _in_low),
        (_FLOAT32, _in_float32),
        (_INTO_FLOAT32, _into_float32),
        (_WIDEST, _in_widest),
    )
    for names, run in manners:
        for name in names:
            if (operator := _operator(name)) is not None:
                library.impl(name, functools.partial(_run, run, operator), _KEY)  # type: ignore[no-untyped-call]
    return library


def _operator(name: str) -> Any:
    """An operator that this torch has, and for which the CPU's autocast does nothing."""
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
    known = operator is None or torch._C._dispatch_has_kernel_for_dispatch_key(
        operator.name(), _KEY
    )
    return None if known else operator


def _run(run: Callable[..., Any], operator: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    ):
        return run(operator, args, kwargs)


def _in_low(operator: Any, args: Any, kwargs: Any) -> Any:
    return _cast(operator, args, kwargs, torch.get_autocast_dtype("cpu"))


def _in_float32(operator: Any, args: Any, kwargs: Any) -> Any:
    return _cast(operator, args, kwargs, torch.float32)


def _in_widest(operator: Any, args: Any, kwargs: Any) -> Any:
    widest = torch.get_autocast_dtype("cpu")
    for tensor in _floats((args, kwargs)):
        widest = torch.promote_types(widest, tensor.dtype)
    return _cast(operator, args, kwargs, widest)


def _into_float32(operator: Any, args: Any, kwargs: Any) -> Any:
    first = args[0] if args else kwargs.get("self", kwargs.get("A"))
    names = [argument.name for argument in operator._schema.arguments]
    given = kwargs.get(
        "dtype", args[names.index("dtype")] if names.index("dtype") < len(args) else None
    )
    if given is None and isinstance(first, Tensor) and first.dtype in _LOWEST:
        args = args[: names.index("dtype")]
        kwargs = {**kwargs, "dtype": torch.float32}
    return operator(*args, **kwargs)


def _cast(operator: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if _is_cast(tensor) else tensor

    args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
    return operator(*args, **kwargs)


def _floats(values: Any) -> Iterator[Tensor]:
    return (one for one in tree_flatten(values)[0] if isinstance(one, Tensor) and _is_cast(one))


def _is_cast(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype is not torch.float64
