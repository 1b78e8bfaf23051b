"""Low-rank adapters: put into a model, switched off for the reference, taken out for an export."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from recipe import Adapter
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class LoraLinear(nn.Module):
    """A frozen linear layer plus `alpha / rank * B A x`. B starts at zero, so that nothing changes at first."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, stream: torch.Generator) -> None:
        super().__init__()
        self.base = base
        self.scale = alpha / rank
        self.active = True
        spread = 1 / math.sqrt(base.in_features)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features, generator=stream) * spread)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        out = self.base(x)
        if self.active:
            out = out + (x @ self.lora_a.t()) @ self.lora_b.t() * self.scale
        return out


def add_adapters(model: nn.Module, config: Adapter) -> nn.Module:
    """Replace every target layer, and thaw the extra parameters. Must come before the model is sharded."""
    stream = torch.Generator().manual_seed(config.seed)
    found = []
    for name, module in list(model.named_modules()):
        for child, layer in list(module.named_children()):
            if child in config.targets and isinstance(layer, nn.Linear):
                setattr(module, child, LoraLinear(layer, config.rank, config.alpha, stream))
                found.append(f"{name}.{child}")
    missing = [target for target in config.targets if not any(name.endswith(target) for name in found)]
    if missing:
        raise SystemExit(f"no linear layer is called {', '.join(missing)}")
    for name, parameter in model.named_parameters():
        if any(part in name for part in config.extra):
            parameter.requires_grad_(True)
    return model


@contextmanager
def reference(model: nn.Module) -> Iterator[None]:
    """The model as it was before the adapters (the extra parameters stay as they are trained)."""
    adapters = [module for module in model.modules() if isinstance(module, LoraLinear)]
    for adapter in adapters:
        adapter.active = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.active = True


def export(model: nn.Module, config: Adapter, folder: Path) -> None:
    """Write what was trained, whole, from rank 0; all ranks must call this."""
    weights = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            weights[name.replace("_checkpoint_wrapped_module.", "")] = whole.detach().cpu()
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(weights, folder / "adapter.pt")
        (folder / "adapter.json").write_text(json.dumps(asdict(config), indent=2) + "\n", encoding="utf-8")
    dist.barrier()
