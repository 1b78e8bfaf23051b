"""Prints a hash of all weights and optimizer states of a rank when its process ends."""

import atexit
import hashlib
import os
import sys
from typing import Any


class AfterTorch:
    """Installs the hook as soon as torch.optim has been imported."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "torch.distributed.fsdp" or name == "torch.distributed.checkpoint":
            sys.meta_path.remove(AfterTorch)  # type: ignore[arg-type]
            watch()


def watch() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    seen: dict[int, Any] = {}
    steps: list[int] = []

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        seen[id(optimizer)] = optimizer
        steps.append(1)

    def ended() -> None:
        digest = hashlib.sha256()
        for optimizer in seen.values():
            for group in optimizer.param_groups:
                for param in group["params"]:
                    state = optimizer.state.get(param, {})
                    for value in (param, *(state[key] for key in sorted(state))):
                        add(digest, value)
        if seen:
            rank = os.environ.get("RANK", "0")
            line = f"HASH rank {rank} steps {len(steps)} {digest.hexdigest()}\n"
            os.write(1, line.encode())  # at once: lines of ranks do not mix

    register_optimizer_step_post_hook(stepped)
    atexit.register(ended)


def add(digest: Any, value: Any) -> None:
    import torch

    if isinstance(value, torch.Tensor):
        part = getattr(value, "_local_tensor", value).detach().cpu().contiguous()
        while hasattr(part, "__tensor_flatten__"):
            part = getattr(part, part.__tensor_flatten__()[0][0])
        digest.update(part.reshape(-1).view(torch.uint8).numpy().tobytes())


if os.environ.get("HASH_AT_END"):
    sys.meta_path.insert(0, AfterTorch)  # type: ignore[arg-type]
