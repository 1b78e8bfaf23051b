"""Adaptive gradient clipping (NFNets) for parameters sharded along dim 0."""
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


def unitwise_norm(t):
    """Norm of every output unit; biases and gains count as a single unit."""
    x = local(t)
    if t.ndim <= 1:
        sq = x.pow(2).sum()
        if isinstance(t, DTensor):
            dist.all_reduce(sq)
        return sq.sqrt()
    return x.pow(2).sum(dim=tuple(range(1, x.ndim)), keepdim=True).sqrt()


@torch.no_grad()
def adaptive_clip_(params, clipping=0.08, eps=1e-3):
    for p in params:
        if p.grad is None:
            continue
        limit = unitwise_norm(p).clamp(min=eps) * clipping
        norm = unitwise_norm(p.grad).clamp(min=1e-6)
        local(p.grad).mul_((limit / norm).clamp(max=1.0))
