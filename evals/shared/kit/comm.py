"""The process group, or the lack of one: all of this also works in a single process that torchrun did not start."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def start(backend: str = "gloo") -> None:
    """Join the group that torchrun describes in the environment."""
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group(backend)


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    return rank() == 0


def wait() -> None:
    """Until every rank is here."""
    if dist.is_initialized():
        dist.barrier()


def total(*values: float) -> list[float]:
    """Each value summed over the ranks; to be called on every rank."""
    numbers = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(numbers)
    return numbers.tolist()


def largest(value: float) -> float:
    """The largest of the ranks' values; to be called on every rank."""
    number = torch.tensor(value, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
    return number.item()


def from_main(value: Any) -> Any:
    """What rank 0 has, on every rank."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def only_main(function: Callable[..., None]) -> Callable[..., None]:
    """A function that does something on rank 0 and nothing on the others."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> None:
        if is_main():
            function(*args, **kwargs)

    return call
