"""Auxiliary-loss-free load balancing (the expert bias moves by a fixed step against the load)."""
import torch
import torch.distributed as dist

from model import MoE


@torch.no_grad()
def update_expert_bias(model, rate):
    """Call once after every optimizer step."""
    for m in model.modules():
        if not isinstance(m, MoE):
            continue
        load = m.load.clone()
        dist.all_reduce(load)
        m.expert_bias += rate * torch.sign(load.mean() - load)
        m.load.zero_()


def max_violation(load):
    return ((load.max() - load.mean()) / load.mean()).item()
