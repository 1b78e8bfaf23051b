"""Adaptive gradient clipping: the norm of every gradient is bounded by a share of its weight's norm."""
import torch
from torch.distributed.tensor import DTensor


def norm_of(t):
    if isinstance(t, DTensor):
        t = t.to_local()
    return torch.linalg.vector_norm(t)


@torch.no_grad()
def adaptive_clip_(parameters, clip=0.02, eps=1e-3):
    clipped = 0
    for p in parameters:
        if p.grad is None:
            continue
        limit = clip * norm_of(p).clamp(min=eps)
        norm = norm_of(p.grad)
        if norm > limit:
            p.grad.mul_((limit / norm).item())
            clipped += 1
    return clipped
