"""The laws that a training holds at its real size, one a file.

A law works in four places. In the main thread it sees forwards, backwards, steps (cheap, nothing
that waits for a device), and measures at a check. In the guard's thread `local` judges what one
rank knows alone, `post` makes what the rank leaves for the comparison, and `judge`, on rank 0,
holds the posts of all ranks against each other.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..context import Context
from ..journal import Breach
from ..measured import Measured

Posts = dict[int, dict[str, Any]]  # {rank: what the law has posted}


class Law:
    """One law in one rank."""

    name = ""

    def __init__(self, context: Context) -> None:
        self.context = context

    def breach(self, step: int, message: str, **more: Any) -> Breach:
        """A breach of this law; `more`: fields of Breach."""
        more.setdefault("command", self.context.verify_command())
        return Breach(self.name, step, message, **more)

    def install(self) -> None:
        """Subscribe to functions of torch."""

    def forward(self, module: nn.Module, given: list[torch.Tensor]) -> None:
        """A model is about to be called for training with these tensors."""

    def backward(self, losses: list[torch.Tensor]) -> None:
        """A backward is about to begin from these tensors."""

    def after_backward(self) -> None:
        """A backward has ended."""

    def stepping(self, optimizer: Optimizer, due: bool) -> None:
        """An optimizer is about to step; `due`: in a step that is checked."""

    def stepped(self, lead: bool) -> None:
        """An optimizer has stepped; `lead`: the one by whose steps the guard counts."""

    def begin(self, measured: Measured) -> None:
        """Measure before the first step of this process."""

    def measure(self, measured: Measured) -> None:
        """Measure at a check."""

    def local(self, measured: Measured) -> Iterable[Breach]:
        """Breaches that this rank sees alone."""
        return ()

    def post(self, measured: Measured) -> dict[str, Any]:
        """What this rank leaves for the comparison."""
        return {}

    def details(self, step: int) -> dict[str, Any] | None:
        """What rank 0 asks for after a comparison that failed; None if there is nothing."""
        return None

    def judge(self, measured: Measured, posts: Posts) -> Iterable[Breach]:
        """Breaches that the posts of all ranks show, on rank 0; `measured` is rank 0's own."""
        return ()
