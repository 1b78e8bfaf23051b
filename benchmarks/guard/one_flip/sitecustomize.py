"""Flips one bit of one weight on one rank after one step of the optimizer: FLIP=STEP:RANK.

It waits for nothing and imports no torch by itself; steps are those of this process.
"""

import os
import sys
from typing import Any


class AfterTorch:
    """Installs the hook as soon as torch's FSDP is imported."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "torch.distributed.fsdp":
            sys.meta_path.remove(AfterTorch)  # type: ignore[arg-type]
            watch()


def watch() -> None:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    wanted, rank = map(int, os.environ["FLIP"].split(":"))
    steps: list[int] = []

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        steps.append(1)
        if len(steps) == wanted and int(os.environ.get("RANK", "0")) == rank:
            param = optimizer.param_groups[0]["params"][2]
            part = getattr(param, "_local_tensor", param).detach().view(torch.int32).view(-1)
            part[part.numel() // 2] ^= 1 << 12

    register_optimizer_step_post_hook(stepped)


if os.environ.get("FLIP"):
    sys.meta_path.insert(0, AfterTorch)  # type: ignore[arg-type]
