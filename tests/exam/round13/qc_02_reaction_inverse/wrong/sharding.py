"""Sharding of the field network. The physical coefficients are tiny and stay whole on every rank."""
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard


def shard(problem):
    loose = set(problem.coef.parameters())
    # one unit for the whole field: the derivatives for the residual are taken inside its forward
    fully_shard(problem, ignored_params=loose)
    return problem


@torch.no_grad()
def average_loose_gradients(coef):
    for p in coef.parameters():
        if p.grad is not None and p.ndim == 0:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
