"""Sharding of the experts; routers are replicated and handled here."""
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard


def shard(model):
    routers = {p for b in model.blocks for p in b.router.parameters()}
    for b in model.blocks:
        fully_shard(b, ignored_params=routers)
    fully_shard(model, ignored_params=routers)
    return model


def replicated_parameters(model):
    return [p for b in model.blocks for p in b.router.proj.parameters()]


@torch.no_grad()
def average_gradients(params):
    flat = torch.cat([p.grad.flatten() for p in params])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    at = 0
    for p in params:
        p.grad.copy_(flat[at:at + p.numel()].view_as(p))
        at += p.numel()
