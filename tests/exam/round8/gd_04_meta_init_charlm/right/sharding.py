"""Build on the meta device, shard, then give storage and initial values."""
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def build_sharded(factory, seed):
    with torch.device("meta"):
        model = factory()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    init_weights(model, seed)
    return model


@torch.no_grad()
def init_weights(model, seed):
    gen = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if p.dim() == 1:
            p.fill_(1.0)
            continue
        value = torch.empty(p.shape).normal_(0.0, model.std_of(name, p), generator=gen)
        p.copy_(distribute_tensor(value, p.device_mesh, p.placements) if isinstance(p, DTensor) else value)
