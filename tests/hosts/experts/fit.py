"""Two optimizers, and one update."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from conf import Fit
from nets import Mind
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer


def optimizers(model: nn.Module, how: Fit) -> dict[str, Optimizer]:
    """SGD with momentum for weights inside the blocks, AdamW for embedding, positions, gains and routers."""
    matrices, vectors = [], []
    for name, parameter in model.named_parameters():
        inside = name.startswith("blocks.") and not name.endswith(("gains", "router"))
        (matrices if inside else vectors).append(parameter)
    return {
        "matrices": SGD(
            matrices, lr=how.matrix_lr, momentum=how.matrix_momentum, weight_decay=how.matrix_decay, nesterov=True
        ),
        "vectors": AdamW(vectors, lr=how.vector_lr, weight_decay=0.0, betas=(0.9, 0.99)),
    }


def rate(update: int, how: Fit) -> float:
    """The factor of both learning rates: a ramp, then an inverse square root with a linear end."""
    ramp = min(1.0, (update + 1) / how.warmup)
    decay = 1 / math.sqrt(1 + max(0, update - how.warmup) / how.warmup)
    end = min(1.0, (how.updates - update) / max(1, how.updates // 5))
    return ramp * decay * end


def set_rates(kinds: dict[str, Optimizer], update: int, how: Fit) -> None:
    """Learning rates depend on the update only, so nothing of them has to be saved."""
    for name, base in (("matrices", how.matrix_lr), ("vectors", how.vector_lr)):
        for group in kinds[name].param_groups:
            group["lr"] = base * rate(update, how)


def update_once(
    model: Mind, kinds: dict[str, Optimizer], pieces: Iterable[tuple[Tensor, Tensor]], how: Fit
) -> dict[str, float]:
    """Forward and backward over the pieces, clip, step. Returns means over the whole world."""
    pieces = list(pieces)
    seen = torch.zeros(2, device=pieces[0][0].device)
    for number, (tokens, answers) in enumerate(pieces):
        model.set_requires_gradient_sync(number == len(pieces) - 1)
        entropy, penalty = model.objective(tokens, answers)
        loss = (entropy + how.router_penalty * penalty) / len(pieces)
        loss.backward()
        seen += torch.stack([entropy.detach(), penalty.detach()]) / len(pieces)
    norm = nn.utils.clip_grad_norm_(model.parameters(), how.clip)
    for optimizer in kinds.values():
        optimizer.step()
    for optimizer in kinds.values():
        optimizer.zero_grad()
    dist.all_reduce(seen)
    entropy, penalty = (seen / dist.get_world_size()).tolist()
    whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return {"entropy": entropy, "penalty": penalty, "norm": whole.item()}
