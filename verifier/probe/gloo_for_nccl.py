"""Where NCCL refuses that ranks share a GPU: gloo carries the CUDA tensors, whatever backend the script asks for."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d


def install() -> None:
    """From now on every process group of this process is one of gloo."""
    start, group = dist.init_process_group, dist.new_group

    @functools.wraps(start)
    def started(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)  # would bind the group to NCCL
        start("gloo", *args, **kwargs)

    @functools.wraps(group)
    def grouped(*args: Any, **kwargs: Any) -> Any:
        kwargs["backend"] = "gloo"
        kwargs.pop("device_id", None)
        return group(*args[:2], **kwargs)

    for place in (dist, distributed_c10d, device_mesh):
        place.init_process_group = started  # type: ignore[attr-defined]
    for place in (dist, distributed_c10d):
        place.new_group = grouped  # type: ignore[attr-defined]
