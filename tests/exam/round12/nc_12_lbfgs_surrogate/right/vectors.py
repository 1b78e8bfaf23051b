"""A parameter vector that is spread over the ranks: lists of local shards, scalar products summed over all ranks."""
import torch
import torch.distributed as dist


def dots(*pairs):
    """several scalar products with one reduction"""
    local = torch.stack([sum((a * b).sum() for a, b in zip(u, v)) for u, v in pairs])
    dist.all_reduce(local)
    return local.tolist()


def axpy(alpha, x, y):
    return [alpha * a + b for a, b in zip(x, y)]


def scale(alpha, x):
    return [alpha * a for a in x]
