import torch
from torch.distributed.tensor import DTensor


@torch.no_grad()
def init_weights(model, seed):
    """Fill a materialised model: N(0, 1/fan_in) for every weight."""
    gen = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        std = p.shape[-1] ** -0.5
        local = p.to_local() if isinstance(p, DTensor) else p
        local.copy_(torch.randn(local.shape, generator=gen) * std)
