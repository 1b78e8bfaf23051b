import torch
from torch.distributed.tensor import DTensor, distribute_tensor


@torch.no_grad()
def init_weights(model, seed):
    """Fill a materialised model: N(0, 1/fan_in) for every weight."""
    gen = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        std = p.shape[-1] ** -0.5
        value = torch.randn(p.shape, generator=gen) * std
        if isinstance(p, DTensor):
            value = distribute_tensor(value, p.device_mesh, p.placements).to_local()
            p.to_local().copy_(value)
        else:
            p.copy_(value)
