"""`torch.cuda.FloatTensor` and its like: types of before `device=`, which code still calls and asks
`isinstance` of.
"""

from typing import Any

import torch
from torch import Tensor

from ...session import Session

_DTYPES = {
    "Float": torch.float32,
    "Double": torch.float64,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
}


class _OnCuda(type):
    """The type of tensors of one dtype on CUDA."""

    dtype: torch.dtype

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, Tensor) and value.is_cuda and value.dtype == cls.dtype

    def __call__(cls, *given: Any) -> Tensor:
        """Of sizes, memory that nobody has written; else a tensor of the data."""
        if len(given) == 1 and not isinstance(given[0], int | torch.Size):
            return torch.as_tensor(given[0], dtype=cls.dtype, device="cuda")
        sizes = given[0] if given and isinstance(given[0], torch.Size) else (given or (0,))
        return torch.empty(sizes, dtype=cls.dtype, device="cuda")


def install(session: Session) -> None:
    """Replace the types, which a build without CUDA only names."""
    for name, dtype in _DTYPES.items():
        there = _OnCuda(f"{name}Tensor", (), {"dtype": dtype, "__module__": "torch.cuda"})
        setattr(torch.cuda, f"{name}Tensor", there)
