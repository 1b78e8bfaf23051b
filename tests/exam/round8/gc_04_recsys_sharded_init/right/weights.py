"""Weights are made after sharding, so that no rank ever holds the whole model (the tables are large in production)."""
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, distribute_tensor


def fill(name, w):
    if name.endswith("scale"):
        nn.init.ones_(w)
    elif name.endswith("bias"):
        nn.init.zeros_(w)
    elif "ids" in name:
        nn.init.normal_(w, std=0.1)
    else:
        nn.init.normal_(w, std=w.shape[1] ** -0.5)


@torch.no_grad()
def materialize(model, seed):
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            whole = torch.empty(p.shape, dtype=p.dtype)
            fill(name, whole)
            p.copy_(distribute_tensor(whole, p.device_mesh, p.placements))
        else:
            fill(name, p)
