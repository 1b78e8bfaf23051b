"""Files of `torch.save`: tensors on CUDA are saved as such, and lie there again when they are
loaded.

A file may name a device that only a run on more ranks had.
"""

from typing import Any

import torch

from ...session import Session
from .marks import CUDA, MARK

_BEFORE_THE_CPU = 5  # torch's own is 10


def _tag(storage: Any) -> str | None:
    storage = getattr(storage, "_untyped_storage", storage)
    device = getattr(storage, MARK, None)
    return str(device) if device is not None and device.type == "cuda" else None


def _restore(storage: Any, location: str) -> Any:
    if not str(location).startswith("cuda"):
        return None
    index = torch.device(location).index or 0
    setattr(storage, MARK, torch.device("cuda", index if index < CUDA.count else 0))
    return storage


def install(session: Session) -> None:
    """Register both with torch."""
    torch.serialization.register_package(_BEFORE_THE_CPU, _tag, _restore)
